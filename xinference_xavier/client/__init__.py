"""What other programs use to watch and steer sharing over xinference's REST API."""

from xinference_xavier.client.client import AsyncXavierClient, XavierClient

__all__ = ["AsyncXavierClient", "XavierClient"]
