"""The table of versions shows the latest results and keeps the rows of versions not tested."""

from pathlib import Path

from tests.matrix import table
from tests.matrix.environments import VERSIONS
from xinference_xavier.vllm_versions import NEWEST, OLDEST

ROOT = Path(__file__).parents[2]


def test_every_supported_vllm_is_tested() -> None:
    tried = {version.name.removeprefix("vllm ").rpartition(".")[0] for version in VERSIONS}
    assert {f"0.{minor}" for minor in range(OLDEST[1], NEWEST[1] + 1)} <= tried


def test_every_test_that_a_version_runs_exists() -> None:
    steps = [step for version in VERSIONS for step in version.steps.values()]
    paths = {each for step in steps for each in step.arguments if each.startswith("tests/")}
    assert len(paths) > 5
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_the_page_has_a_row_for_every_tested_version() -> None:
    assert table._ROW.findall(table.PAGE.read_text()) == [version.name for version in VERSIONS]
