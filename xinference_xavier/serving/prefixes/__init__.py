"""Named prefixes in xinference's API."""
