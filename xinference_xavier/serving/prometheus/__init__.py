"""Our metrics on xinference's `/metrics`."""
