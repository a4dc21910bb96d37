"""An operator looks at what replicas have saved on a host, without xinference."""

import errno
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from xinference_xavier.cli.commands import main
from xinference_xavier.disk_store import Store, summaries
from xinference_xavier.pool.region import Region

ROW_BYTES = 4096


def run(*words: str, typed: str = "") -> Result:
    return CliRunner().invoke(main, ["disk", *words], input=typed, catch_exceptions=False)


def saved(parent: Path, model: str, rows: int) -> Path:
    """The folder of a model's store with some rows."""
    store = Store(parent, model, ROW_BYTES, 1 << 20, model)
    region = Region.create(rows, ROW_BYTES)
    for number in range(rows):
        key = number.to_bytes(36)
        region.row(number)[:] = number
        store.write(key, region.row(number).data, region.checksum(number, key))
    return store.folder


def test_stores_are_listed(tmp_path: Path) -> None:
    saved(tmp_path, "qwen", 3)
    saved(tmp_path, "llama", 1)
    listed = run("ls", str(tmp_path))
    assert listed.exit_code == 0
    assert {line.split()[0] for line in listed.output.splitlines()[1:]} == {"qwen", "llama"}
    assert "24.0 KiB" in listed.output


def test_an_empty_folder_has_none(tmp_path: Path) -> None:
    assert run("ls", str(tmp_path)).output == "No replica has saved anything there.\n"
    assert run("clear", str(tmp_path)).output == f"No store to remove in {tmp_path}.\n"


def test_rows_are_verified_and_wrong_ones_removed(tmp_path: Path) -> None:
    folder = saved(tmp_path, "qwen", 3)
    assert run("check", str(tmp_path)).output == f"{folder.name}: 3 right, 0 wrong\n"
    row = folder / "00" / f"{(1).to_bytes(36).hex()}.row"
    row.write_bytes(b"damage" + row.read_bytes()[6:])
    checked = run("check", str(tmp_path))
    assert checked.output == f"{folder.name}: 2 right, 1 wrong, removed\n"
    assert checked.exit_code == 1
    assert run("check", str(tmp_path)).output == f"{folder.name}: 2 right, 0 wrong\n"


def test_rows_that_cannot_be_read_are_counted_and_the_others_verified(tmp_path: Path) -> None:
    folder = saved(tmp_path, "qwen", 3)
    row = folder / "00" / f"{(1).to_bytes(36).hex()}.row"
    unreadable = folder / "00" / f"{(0).to_bytes(36).hex()}.row"
    row.write_bytes(b"damage" + row.read_bytes()[6:])
    reading = Store.read

    def read(store: Store, key: bytes, row: memoryview) -> int:
        if key.hex() in unreadable.name:
            store._keys[key[0]].discard(key)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return reading(store, key, row)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "read", read)
        checked = run("check", str(tmp_path))
    text = f"{folder.name}: 1 right, 1 wrong, removed, 1 cannot be read\n"
    assert checked.stdout == text
    assert f"{(0).to_bytes(36).hex()}: [Errno 5] Input/output error" in checked.stderr
    assert checked.exit_code == 1


@pytest.mark.parametrize(("options", "left"), [([], set()), (["--model", "qwen"], {"llama"})])
def test_stores_are_removed(tmp_path: Path, options: list[str], left: set[str]) -> None:
    """Nothing else is."""
    saved(tmp_path, "qwen", 1)
    saved(tmp_path, "llama", 1)
    for name in ("notes.txt", "0" * 32, "cache.store"):
        (tmp_path / name).mkdir()
    cleared = run("clear", str(tmp_path), *options, "--yes")
    assert f"{2 - len(left)} of 2 stores removed" in cleared.output
    assert {each.model for each in summaries(tmp_path)} == left
    assert len([*tmp_path.iterdir()]) == len(left) + 3


@pytest.mark.parametrize(("typed", "left"), [("y\n", 0), ("n\n", 2), ("", 2)])
def test_whoever_removes_stores_is_asked(tmp_path: Path, typed: str, left: int) -> None:
    saved(tmp_path, "qwen", 1)
    (former := tmp_path / ("0123456789abcdef" * 2)).mkdir()
    (former / "index.db").touch()
    cleared = run("clear", str(tmp_path), typed=typed)
    assert f"To be removed, of 2 stores in {tmp_path}:" in cleared.output
    assert "qwen" in cleared.output
    assert "(not in use)" in cleared.output
    assert len(summaries(tmp_path)) == left
    assert cleared.exit_code == (1 if left else 0)


def test_a_folder_that_cannot_be_read_is_said_in_a_sentence(tmp_path: Path) -> None:
    store = saved(tmp_path, "qwen", 1)
    store.chmod(0o777)
    listed = run("check", str(tmp_path))
    assert listed.exit_code == 1
    assert listed.output.startswith(f"Error: {tmp_path} cannot be read: xavier_disk=")
