"""The README as a package index shows it."""

import re
import shutil
import subprocess
import sys
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


def test_an_archive_of_a_tag_has_its_version(tmp_path: Path) -> None:
    """It has no `.git`; without a version of their own, different builds would look equal."""
    assert ".git_archival.txt export-subst" in (ROOT / ".gitattributes").read_text()
    for name in ("pyproject.toml", "README.md", "hatch_build.py"):
        shutil.copy(ROOT / name, tmp_path)
    told = (ROOT / ".git_archival.txt").read_text()
    told = re.sub(r"\$Format:%\(describe.*\$", "v1.2.3", told)
    (tmp_path / ".git_archival.txt").write_text(re.sub(r"\$Format:.*\$", "0" * 40, told))
    asked = [sys.executable, "-m", "hatchling", "version"]
    version = subprocess.run(asked, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert version.strip() == "1.2.3"


def _metadata() -> dict[str, dict[str, str]]:
    metadata: dict[str, dict[str, str]] = {}
    Published(str(ROOT), {}).update(metadata)
    return metadata
