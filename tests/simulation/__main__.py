"""`python -m tests.simulation SEED` repeats one run and prints what happens."""

import sys
import tempfile
from pathlib import Path

from examples.make_model import make_model
from tests.engine.vllm_scheduler import engine_config
from tests.simulation.options import Options
from tests.simulation.simulation import Simulation

with tempfile.TemporaryDirectory() as folder:
    config = engine_config(make_model(Path(folder)))
simulation = Simulation(Options(int(sys.argv[1])), config)
simulation.on_event = print
simulation.run()
