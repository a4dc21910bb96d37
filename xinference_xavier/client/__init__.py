"""A client of the REST interface, for programs that watch and steer sharing."""

from xinference_xavier.client.client import XavierClient

__all__ = ["XavierClient"]
