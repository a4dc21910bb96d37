"""The version, for those that must not import the package's other modules."""

__version__ = "0.1.0"
