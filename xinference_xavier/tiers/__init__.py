"""Where rows of the pool can be filled from: an interface, and a tier in memory."""
