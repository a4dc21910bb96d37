"""What is reported of sharing: its types, its shape, its last hour. Pure."""
