"""The table of versions shows the latest results and keeps the rows of versions not tested."""

from pathlib import Path

from tests.matrix import table
from tests.matrix.environments import VERSIONS
from xinference_xavier.vllm_versions import NEWEST, OLDEST

ROOT = Path(__file__).parents[2]
HEAD = "| a | b | c | d | e | f |\n|---|---|---|---|---|---|\n"
REPORT = {
    "versions": {
        "vllm 0.31.0": {
            "date": "2026-11-22",
            "commit": "1a2b3c4",
            "steps": {
                "unit": {"passed": 335, "failed": 0},
                "engines": {"passed": 30, "failed": 2},
            },
        },
        "xinference 4.1.0": {
            "date": "2026-11-22",
            "commit": "1a2b3c4",
            "steps": {"unit": {"passed": 9, "failed": 0}, "xinference": {"passed": 7, "failed": 0}},
        },
    }
}
ROWS = (
    "| `vllm 0.31.0` | 335 ✓ | 30 ✓, 2 ✗ | – | – | 2026-11-22, `1a2b3c4` |\n",
    "| `xinference 4.1.0` | 9 ✓ | – | – | 7 ✓ | 2026-11-22, `1a2b3c4` |\n",
)


def test_rows_come_in_the_order_of_versions_and_others_stay(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    older = "| `vllm 0.32.0` | 1 ✓ | 1 ✓ | – | 1 ✓ | 2026-01-01 |\n"
    replaced = "| `vllm 0.31.0` | 2 ✓ | 1 ✓ | – | 1 ✓ | 2026-01-01 |\n"
    page.write_text(f"before\n\n{HEAD}{replaced}{older}\nafter\n")
    table.write(REPORT, page)
    assert page.read_text() == f"before\n\n{HEAD}{ROWS[0]}{older}{ROWS[1]}\nafter\n"


def test_an_empty_table_is_filled(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{HEAD}\nafter\n")
    table.write(REPORT, page)
    assert page.read_text() == f"before\n\n{HEAD}{''.join(ROWS)}\nafter\n"


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
