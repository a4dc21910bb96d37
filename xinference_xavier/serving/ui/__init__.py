"""The web interface: the switch in xinference's launch dialog, and the page `/xavier/`."""
