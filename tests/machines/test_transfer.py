"""Files between machines: whole or not at all, only where rank 0 allows it, and a failure is told to all."""

import errno
import os
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.machines.plain_door import TOKEN, PlainDoor, plain_door
from uneven.machines import file_service, transfer
from uneven.machines.transfer import RefusedError, receive_file, send_file
from uneven.machines.wire import CHUNK, Connection, WireError, greet

PARTIAL, MARK = ".step-4.partial-key1_0", ".step-4.failed-key1_0"
PLACES = ("rank 0 on lab-a", "rank 1 on lab-b", "rank 2 on lab-b")
CONTENT = os.urandom(3 * CHUNK + 5)


@pytest.fixture
def door() -> Iterator[PlainDoor]:
    with plain_door() as door:
        yield door


@pytest.fixture
def out(door: PlainDoor, tmp_path: Path) -> Path:
    """The run's folder on the leader's machine, which rank 0 has opened."""
    (tmp_path / "out").mkdir()
    door.reach(tmp_path / "rank 0").share("key1", tmp_path / "out", places=PLACES)
    return tmp_path / "out"


def part_of(rank: int, folder: Path, content: bytes = CONTENT) -> list[Path]:
    folder.mkdir(exist_ok=True)
    files = {f"rank-{rank}.safetensors": content, f"rank-{rank}.json": b"{}"}
    for name, value in files.items():
        (folder / name).write_bytes(value)
    return [folder / name for name in files]


def exchanged(send: Callable[[Connection], object], receive: Callable[[Connection], object]) -> tuple[Any, Any]:
    """What each side returned or raised."""
    first, second = socket.socketpair()
    found: list[Any] = [None, None]

    def run(place: int, act: Callable[[Connection], object], connection: Connection) -> None:
        try:
            found[place] = act(connection)
        except OSError as error:
            found[place] = error
            connection.close()

    with closing(first), closing(second):
        sides = [(0, send, first), (1, receive, second)]
        threads = [threading.Thread(target=run, args=(place, act, _connection(s))) for place, act, s in sides]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return found[0], found[1]


def _connection(sock: socket.socket) -> Connection:
    class Unix:
        """A pair of sockets has no TCP options."""

        def setsockopt(self, *_: object) -> None: ...

        def __getattr__(self, name: str) -> Any:
            return getattr(sock, name)

    return Connection(Unix())  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, 1, CHUNK, len(CONTENT)])
def test_a_file_arrives_whole_and_the_connection_goes_on(size: int, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(CONTENT[:size])
    (tmp_path / "there").mkdir()

    def send(connection: Connection) -> None:
        for _ in range(2):
            send_file(connection, tmp_path / "a.bin")
        connection.send(after=1)

    def receive(connection: Connection) -> object:
        for _ in range(2):
            path = receive_file(connection, tmp_path / "there", {"a.bin"})
        return path.read_bytes(), path.stat().st_mode & 0o777, connection.read(5)

    sent, received = exchanged(send, receive)
    assert sent is None
    assert received == (CONTENT[:size], 0o644, {"after": 1})
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["a.bin"]


HOSTILE = {
    "name not expected": ({"name": "b.bin", "size": 3, "crc32": "0"}, b"abc", "unexpected file 'b.bin'"),
    "path": ({"name": "../a.bin", "size": 3, "crc32": "0"}, b"abc", "unexpected file"),
    "no name": ({"size": 3, "crc32": "0"}, b"abc", "unexpected file"),
    "too long": ({"name": "a.bin", "size": 101, "crc32": "0"}, b"abc", "101 bytes, where 100 are allowed"),
    "negative": ({"name": "a.bin", "size": -1, "crc32": "0"}, b"abc", "a size of -1 bytes"),
    "no number": ({"name": "a.bin", "size": True, "crc32": "0"}, b"abc", "a size of True bytes"),
    "truncated": ({"name": "a.bin", "size": 9, "crc32": "0"}, b"abc", "closed the connection"),
    "damaged": ({"name": "a.bin", "size": 3, "crc32": "00000001"}, b"abc", "damaged on its way: its crc32 is 352441c2"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_not_as_agreed_leaves_nothing(case: str, tmp_path: Path) -> None:
    header, body, fault = HOSTILE[case]

    def send(connection: Connection) -> None:
        connection.send(**header)
        connection.sock.sendall(body)
        connection.close()

    names = {"a.bin", "../a.bin"} if case == "path" else {"a.bin"}
    _, received = exchanged(send, lambda connection: receive_file(connection, tmp_path, names, limit=100))
    assert isinstance(received, WireError)
    assert fault in str(received)
    assert list(tmp_path.iterdir()) == []


def test_a_part_arrives_in_the_folder_of_rank_0(door: PlainDoor, out: Path, tmp_path: Path) -> None:
    rank_1 = door.reach(tmp_path / "b")
    rank_1.put("key1", PARTIAL, part_of(1, tmp_path / "own"))
    assert (out / PARTIAL / "rank-1.safetensors").read_bytes() == CONTENT
    assert sorted(path.name for path in (out / PARTIAL).iterdir()) == ["rank-1.json", "rank-1.safetensors"]
    door.reach(tmp_path / "rank 0").withdraw("key1")
    with pytest.raises(RefusedError, match="it has ended"):
        rank_1.put("key1", PARTIAL, part_of(1, tmp_path / "own"))


@pytest.mark.parametrize(
    ("key", "partial", "name", "fault"),
    [
        ("key2", PARTIAL, "rank-1.json", "no such folder open"),
        ("key1", "../out", "rank-1.json", "no checkpoint of this run"),
        ("key1", ".step-4.partial-key2_0", "rank-1.json", "no checkpoint of this run"),
        ("key1", "step-4", "rank-1.json", "no checkpoint of this run"),
        ("key1", f"{PARTIAL}/..", "rank-1.json", "no checkpoint of this run"),
        ("key1", PARTIAL, "state.json", "no part of this checkpoint"),
        ("key1", PARTIAL, "rank-0.json", "no part of this checkpoint"),
        ("key1", PARTIAL, "rank-3.json", "no part of this checkpoint"),
        ("key1", PARTIAL, "../rank-1.json", "no part of this checkpoint"),
    ],
)
def test_only_parts_of_other_ranks_are_taken(
    door: PlainDoor, out: Path, tmp_path: Path, key: str, partial: str, name: str, fault: str
) -> None:
    with door.reach(tmp_path / "b")._asking("put", key=key, partial=partial, name=name, size=2) as connection:
        assert fault in connection.read(5)["refused"]
    assert list(out.iterdir()) == []


def test_only_who_is_on_the_leaders_machine_opens_a_folder(door: PlainDoor, tmp_path: Path) -> None:
    leader = door.reach(tmp_path / "b")
    with leader._asking("share", key="k", folder=str(tmp_path), names=["a"], places=[]) as connection:
        assert "prove" in connection.read(5)
        connection.send(do="proven")  # from elsewhere: it cannot make the file
        assert "only rank 0, on the leader's machine" in connection.read(5)["refused"]
    (tmp_path / "a").write_text("secret")
    with pytest.raises(RefusedError, match="no such folder"):
        leader.get("k", ["a"], tmp_path)


def test_only_listed_files_are_given_out(door: PlainDoor, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(CONTENT)
    (tmp_path / "private").write_text("x")
    leader = door.reach(tmp_path / "b")
    leader.share("k", tmp_path, names=["a.bin", "gone", "../x"])
    (tmp_path / "copy").mkdir()
    leader.get("k", ["a.bin"], tmp_path / "copy")
    for name, fault in {"private": "is not shared", "../x": "is not shared", "gone": "cannot be read"}.items():
        with pytest.raises(RefusedError, match=fault):
            leader.get("k", [name], tmp_path / "copy")
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["a.bin"]
    assert (tmp_path / "copy/a.bin").read_bytes() == CONTENT


def test_a_full_disk_at_the_leader_is_told_to_all(
    door: PlainDoor, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(transfer.os, "fsync", full)
    rank_1 = door.reach(tmp_path / "b")
    with pytest.raises(RefusedError, match=r"^no space left, in the part of rank 1 on lab-b$"):
        rank_1.put("key1", PARTIAL, part_of(1, tmp_path / "own"))
    monkeypatch.undo()
    assert {path.name: path.read_text() for path in out.iterdir()} == {
        MARK: "no space left, in the part of rank 1 on lab-b"
    }
    with pytest.raises(RefusedError, match="rank 1 on lab-b"):  # the others are not asked for theirs
        rank_1.put("key1", PARTIAL, part_of(2, tmp_path / "own"))
    assert [path.name for path in out.iterdir()] == [MARK]


def test_a_part_for_which_there_is_no_room_is_not_sent(
    door: PlainDoor, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_service.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(RefusedError, match=r"no space left \(0.2 MB come, 0.0 MB are free\), in the part of rank 1 on"):
        door.reach(tmp_path / "b").put("key1", PARTIAL, part_of(1, tmp_path / "own"))
    assert [path.name for path in out.iterdir()] == [MARK]


def test_a_connection_that_is_lost_leaves_its_reason_and_nothing_else(
    door: PlainDoor, out: Path, tmp_path: Path
) -> None:
    door.reach(tmp_path / "b").put("key1", PARTIAL, part_of(2, tmp_path / "own"))
    sock = socket.create_connection(door.door[:2])
    connection = greet(sock, TOKEN)
    connection.send(role="files", do="put", key="key1", partial=PARTIAL, name="rank-1.safetensors", size=len(CONTENT))
    assert connection.read(5) == {"go": True}
    connection.send(name="rank-1.safetensors", size=len(CONTENT), crc32=f"{zlib.crc32(CONTENT):08x}")
    sock.sendall(CONTENT[:CHUNK])
    connection.close()
    door.close()
    assert [path.name for path in out.iterdir()] == [MARK]
    assert (out / MARK).read_text().endswith("in the part of rank 1 on lab-b")


def test_a_rank_that_gives_up_tells_all(door: PlainDoor, out: Path, tmp_path: Path) -> None:
    rank_1 = door.reach(tmp_path / "b")
    rank_1.give_up("key1", PARTIAL, 1, "no space\nleft")
    rank_1.give_up("key1", PARTIAL, 2, "later")
    assert (out / MARK).read_text() == "no space left, on rank 1 on lab-b"
    for rank in (0, 3):
        with pytest.raises(RefusedError, match="no rank of this run"):
            rank_1.give_up("key1", PARTIAL, rank, "x")


def test_a_leader_that_is_gone_is_named(tmp_path: Path) -> None:
    with plain_door() as door:
        rank_1 = door.reach(tmp_path / "b")
    with pytest.raises(WireError, match=r"the leader at 127\.0\.0\.1 port \d+ is not reached"):
        rank_1.give_up("key1", PARTIAL, 1, "x")


def test_nonsense_ends_the_connection_and_not_the_service(door: PlainDoor, out: Path, tmp_path: Path) -> None:
    rank_1 = door.reach(tmp_path / "b")
    for request in ({"do": "read"}, {}, {"do": ["put"]}, {"do": "put", "key": 5}, {"do": "share", "key": "../k"}):
        with rank_1._asking() as connection:
            connection.send(role="files", **request)  # type: ignore[arg-type]
            assert "refused" in connection.read(5)
    rank_1.put("key1", PARTIAL, part_of(1, tmp_path / "own"))
    assert (out / PARTIAL).is_dir()
