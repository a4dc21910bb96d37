"""An operator's hook that writes its events to a file."""

import json
import os
from dataclasses import asdict

from xinference_xavier.events import Event

FILE = "XAVIER_RECORDED_EVENTS"
RECORD = f"{__name__}:record"


def record(event: Event) -> None:
    line = json.dumps({"event": type(event).__name__, **asdict(event)})
    with open(os.environ[FILE], "a") as file:
        file.write(f"{line}\n")
