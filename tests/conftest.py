"""What several test modules share."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.make_model import make_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model, made once a session."""
    return make_model(tmp_path_factory.mktemp("model") / "small")
