"""Helpers for asyncio and the operating system that know nothing of sharing."""
