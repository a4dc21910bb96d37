"""Clients for the REST interface, for programs that watch and steer sharing."""

from xinference_xavier.client.client import AsyncXavierClient, XavierClient

__all__ = ["AsyncXavierClient", "XavierClient"]
