"""Helpers for asyncio and the operating system, without domain knowledge."""
