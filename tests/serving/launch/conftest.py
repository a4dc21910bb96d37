"""A supervisor in a real actor pool."""

from pathlib import Path
from typing import Any

import pytest
import xoscar as xo

from tests.serving.launch.launching import AskedTracker, supervisor_class
from xinference_xavier.protocol.tracker import tracker_uid
from xinference_xavier.serving import seam


@pytest.fixture(autouse=True)
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """xinference's, where trackers have names."""
    monkeypatch.setattr(seam, "data_folder", lambda: tmp_path)


@pytest.fixture
def supervisor(address: str) -> Any:
    return supervisor_class()(address)


@pytest.fixture
async def tracker(address: str) -> Any:
    """The tracker of model `m`."""
    return await xo.create_actor(AskedTracker, "m", address=address, uid=tracker_uid("m"))
