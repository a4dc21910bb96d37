"""The version that was installed, importable without the package's other modules."""

from importlib import metadata

try:
    __version__ = metadata.version("xinference-xavier")
except metadata.PackageNotFoundError:  # a checkout on Python's path
    __version__ = "0+unknown"
