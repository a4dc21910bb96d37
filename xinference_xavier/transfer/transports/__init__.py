"""Ways in which rows travel; each is one module."""
