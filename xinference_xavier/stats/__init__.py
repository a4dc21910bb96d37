"""Stats of sharing: their schema, and how they are read, reported and kept. Pure."""
