"""The README as a package index shows it."""

import re
from pathlib import Path

import pytest

from hatch_build import Published, linked

ROOT = Path(__file__).parents[1]
REPOSITORY = "https://host/owner/name"


def test_links_and_pictures_lead_to_the_repository() -> None:
    text = "[a](docs/a.md#b) ![p](docs/p.png) [s](#section) [w](https://elsewhere/)"
    assert linked(text, "https://host/o/n/blob/v1") == (
        "[a](https://host/o/n/blob/v1/docs/a.md#b) "
        "![p](https://host/o/n/blob/v1/docs/p.png?raw=true) [s](#section) [w](https://elsewhere/)"
    )


def test_a_release_has_no_relative_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPOSITORY", REPOSITORY)
    monkeypatch.setenv("REF", "v1.0.0")
    metadata = _metadata()
    links = re.findall(r"\]\(([^)]+)\)", metadata["readme"]["text"])
    assert len(links) > 20
    assert all(link.startswith(("https://", "#")) for link in links)
    assert metadata["urls"]["Changelog"] == f"{REPOSITORY}/blob/v1.0.0/CHANGELOG.md"


def test_without_a_repository_nothing_is_invented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REPOSITORY", raising=False)
    metadata = _metadata()
    assert metadata["readme"]["text"] == (ROOT / "README.md").read_text()
    assert "urls" not in metadata


def _metadata() -> dict[str, dict[str, str]]:
    metadata: dict[str, dict[str, str]] = {}
    Published(str(ROOT), {}).update(metadata)
    return metadata
