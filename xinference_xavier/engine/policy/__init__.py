"""Decisions on the scheduler thread: fetch or compute, which donors, wait for a peer or not."""
