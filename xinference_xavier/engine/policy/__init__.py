"""Decisions on the scheduler thread: fetch or compute, from which donor, wait for a peer or not."""
