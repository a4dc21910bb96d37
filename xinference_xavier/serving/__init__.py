"""The xinference side: the extension, the launch wrapper, the REST routes."""
