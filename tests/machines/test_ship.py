"""The script's folder in an archive: text files travel, nothing gets out of the folder it is unpacked to."""

import io
import tarfile
from pathlib import Path

import pytest

from uneven.errors import InputError
from uneven.machines import ship
from uneven.machines.wire import WireError


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_text_files_travel_and_nothing_else(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    target.mkdir()
    write(source, {"train.py": b"print('hi')\n", "lib/a.py": b"A = 1\n", "config.toml": b"[a]\n"})
    write(source, {"model.pt": b"a checkpoint", "data.dat": b"\x80\x04\x95\x00", ".env": b"SECRET=1\n"})
    write(source, {"lib/__pycache__/a.pyc": b"cache", "venv/lib.py": b"B = 1\n", ".git/config": b"[core]\n"})
    (source / "secret.py").symlink_to("/etc/hostname")
    pieces = ship.chunks(ship.pack(source))
    ship.unpack(ship.join_chunks(pieces), target)
    assert names(target) == ["config.toml", "lib/a.py", "train.py"]
    assert (target / "lib" / "a.py").read_text() == "A = 1\n"


def archive(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as made:
        for entry, content in entries:
            entry.size = len(content)
            made.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def link(kind: bytes) -> tarfile.TarInfo:
    entry = tarfile.TarInfo("link.py")
    entry.type, entry.linkname = kind, "/etc/passwd"
    return entry


@pytest.mark.parametrize(
    "entry",
    [
        tarfile.TarInfo("/absolute.py"),
        tarfile.TarInfo("../out.py"),
        tarfile.TarInfo("a/../../out.py"),
        tarfile.TarInfo("a\\..\\out.py"),
        tarfile.TarInfo("c:/out.py"),
        link(tarfile.SYMTYPE),
        link(tarfile.LNKTYPE),
        link(tarfile.FIFOTYPE),
        link(tarfile.CHRTYPE),
        link(tarfile.DIRTYPE),
    ],
    ids=lambda entry: f"{entry.name} {entry.type!r}",
)
def test_nothing_gets_out_of_its_folder(tmp_path: Path, entry: tarfile.TarInfo) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    with pytest.raises(WireError, match="no plain file"):
        ship.unpack(archive((entry, b"")), inside)
    assert names(tmp_path) == []


def test_an_archive_has_its_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ship, "MOST_BYTES", 1000)
    (tmp_path / "in").mkdir()
    with pytest.raises(WireError, match="more than it may"):  # a few bytes that unpack to many
        ship.unpack(archive((tarfile.TarInfo("a.py"), b"\n" * 5000)), tmp_path / "in")
    with pytest.raises(WireError, match="larger"):
        ship.join_chunks(ship.chunks(b"x" * 5000))
    source = tmp_path / "source"
    write(source, {"a.py": b"#" * 600, "b.py": b"#" * 700})
    with pytest.raises(InputError, match=r"--ship.*the largest is b.py"):
        ship.pack(source)


@pytest.mark.parametrize(
    "broken",
    [b"", b"no archive", archive((tarfile.TarInfo("a.py"), b"x" * 900))[:60]],
    ids=["empty", "no archive", "cut"],  # an archive's bytes have the time in them
)
def test_a_broken_archive_is_refused(tmp_path: Path, broken: bytes) -> None:
    with pytest.raises(WireError, match="cannot be read"):
        ship.unpack(broken, tmp_path)


def test_a_name_twice_is_refused(tmp_path: Path) -> None:
    twice = archive((tarfile.TarInfo("a.py"), b"1"), (tarfile.TarInfo("a.py"), b"2"))
    with pytest.raises(WireError, match="cannot be read"):
        ship.unpack(twice, tmp_path)


def test_what_differs_is_shown_in_a_few_lines() -> None:
    assert ship.differing({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "9", "d": "4"}) == ["b", "c", "d"]
    lines = ship.short_diff("lr = 1\nx = 2\n", "lr = 3\nx = 2\n", "node2", "train.py")
    assert lines == ["--- node2: train.py", "+++ leader: train.py", "@@ -1,2 +1,2 @@", "-lr = 1", "+lr = 3", " x = 2"]
    long = ship.short_diff("\n".join("abc" * 20), "\n".join("xyz" * 20), "node2", "train.py")
    assert len(long) == ship.MOST_DIFF_LINES + 1
    assert "lines more" in long[-1]
