"""The numbers that no measurement stands behind, where nothing depends on the exact value. Whatever
has a reason for another one keeps its own."""

CALL_DEADLINE = 5.0
"""Seconds for a call to another process."""
START_DEADLINE = 60.0
"""Seconds for something to start on a busy machine."""
LONGEST = 600.0
"""Seconds after which nobody waits any more for what an engine computes or writes."""
TICK = 1.0
"""Seconds between two rounds of what is done all the time."""
LOOK = 0.25
"""Seconds between two looks at what nothing announces."""
LEAST_PAUSE, MOST_PAUSE = 0.1, 30.0
"""Seconds after a failure, doubled with each further one."""
LIMIT = 10_000
"""Most of what is remembered or waits: a few megabytes."""
