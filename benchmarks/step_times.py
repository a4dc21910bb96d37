"""`StepTimes` as a worker loads it. Its calls change no weights, so replicas go on to share."""

from benchmarks.steps import StepTimes
from xinference_xavier.engine import compat

compat.READING_CALLS |= {name for name in vars(StepTimes) if not name.startswith("_")}
