"""A copy of the tracker's index, for whoever watches it: a replica, or a router."""
