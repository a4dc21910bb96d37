"""An operator looks at what replicas have saved on a host, without xinference."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from xinference_xavier.cli.commands import main
from xinference_xavier.disk import Store, folder_of
from xinference_xavier.pool.region import Region

ROW_BYTES = 4096


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["disk", *words], catch_exceptions=False)


def saved(parent: Path, model: str, rows: int) -> Path:
    """The folder of a model's store with some rows."""
    folder = folder_of(parent, model, ROW_BYTES)
    store, region = Store(folder, ROW_BYTES, 1 << 20), Region.create(rows, ROW_BYTES)
    store.note("model", model)
    store.note("row_bytes", ROW_BYTES)
    keys = [number.to_bytes(36) for number in range(rows)]
    for slot in store.reserve(rows):
        region.row(slot)[:] = slot
        store.write(slot, region.row(slot).data)
    store.commit((slot, key, region.checksum(slot, key)) for slot, key in enumerate(keys))
    store.close()
    return folder


def test_stores_are_listed(tmp_path: Path) -> None:
    saved(tmp_path, "qwen", 3)
    saved(tmp_path, "llama", 1)
    listed = run("ls", str(tmp_path))
    assert listed.exit_code == 0
    assert {line.split()[0] for line in listed.output.splitlines()[1:]} == {"qwen", "llama"}
    assert "12.0 KiB" in listed.output


def test_an_empty_folder_has_none(tmp_path: Path) -> None:
    assert run("ls", str(tmp_path)).output == "No replica has saved anything there.\n"


def test_rows_are_verified(tmp_path: Path) -> None:
    folder = saved(tmp_path, "qwen", 3)
    assert run("check", str(tmp_path)).output == f"{folder.name}: 3 right, 0 wrong\n"
    with (folder / "rows").open("r+b") as rows:
        rows.write(b"damage")
    checked = run("check", str(tmp_path))
    assert checked.output.startswith(f"{folder.name}: 2 right, 1 wrong\n")
    assert checked.exit_code == 1


@pytest.mark.parametrize(("options", "left"), [([], []), (["--model", "qwen"], ["llama"])])
def test_stores_are_removed(tmp_path: Path, options: list[str], left: list[str]) -> None:
    saved(tmp_path, "qwen", 1)
    saved(tmp_path, "llama", 1)
    cleared = run("clear", str(tmp_path), *options)
    assert cleared.output.startswith(f"{2 - len(left)} of 2 stores removed")
    assert [each.name for each in tmp_path.iterdir()] == [
        folder_of(tmp_path, model, ROW_BYTES).name for model in left
    ]


def test_a_damaged_store_is_shown_and_can_be_removed(tmp_path: Path) -> None:
    folder = saved(tmp_path, "qwen", 1)
    (folder / "index.db").write_bytes(b"no database")
    assert "file is not a database" in run("ls", str(tmp_path)).output
    checked = run("check", str(tmp_path))
    assert checked.output.startswith(f"{folder.name}: file is not a database\n")
    assert checked.exit_code == 1
    assert run("clear", str(tmp_path)).output.startswith("1 of 1 stores removed")


def test_a_folder_that_cannot_be_read_is_said_in_a_sentence(tmp_path: Path) -> None:
    index = saved(tmp_path, "qwen", 1) / "index.db"
    index.unlink()
    index.mkdir()
    listed = run("ls", str(tmp_path))
    assert listed.exit_code == 1
    assert listed.output.startswith(f"Error: {tmp_path} cannot be read: [Errno 21]")
