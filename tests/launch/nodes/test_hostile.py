"""Somebody who knows the token and means harm: a leader against a machine that joins, and that against a leader."""

import os
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.launch.nodes.leaders import OPTIONS, TOKEN, Joined, Leader, bring, send_facts
from uneven.errors import InputError, RankError
from uneven.files import is_closed
from uneven.launch.nodes import node as joining
from uneven.launch.nodes.node import find_permitted
from uneven.machines.code import digest, read_code, script_digests
from uneven.machines.door import Door, listen
from uneven.machines.facts import stamped
from uneven.machines.messages import FROM_LEADER, checked
from uneven.machines.wire import Connection, WireError

SCRIPT = "import helper\n"
STANDARD = Path(sysconfig.get_paths()["stdlib"]) / "timeit.py"
Changes = dict[str, Any]


@pytest.fixture(autouse=True)
def tracebacks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Of threads: there are none."""
    found: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: found.append(args.exc_value))
    yield found
    assert found == []


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `uneven join` is typed."""
    made = tmp_path / "project"
    made.mkdir()
    (made / "train.py").write_text(SCRIPT)
    (made / "helper.py").write_text("")
    monkeypatch.chdir(made)
    return made


class Victim:
    """A machine that joins a leader of the test; `started` has the orders that its ranks got."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[Any] = []
        self.said: list[str] = []
        self.door = Door(listen("127.0.0.1"), TOKEN)
        self.door.open({"node": self._serve})

        @contextmanager
        def start(folder: Path, placement: Any, order: Any, say: Any) -> Iterator[None]:
            self.started.append(order)
            yield None

        monkeypatch.setattr(joining, "local_ranks", start)
        monkeypatch.setattr(joining.Node, "_watch", lambda *_: {"end": "", "code": 0})

    def join(self, handle: Callable[[Connection], None], **options: Any) -> Exception | None:
        """What it ends with, when the leader does this."""
        self._handle = handle
        try:
            joining.join_run(joining.JoinOptions(self.door.place, TOKEN, "cpu", **options), self.said.append)
        except (InputError, RankError) as error:
            return error
        return None

    def _serve(self, connection: Connection, _: Any) -> None:
        try:
            self._handle(connection)
        finally:
            connection.close()


@pytest.fixture
def victim(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Victim]:
    made = Victim(monkeypatch)
    yield made
    made.door.close()


def order_of(folder: Path, **changes: Any) -> Changes:
    code = script_digests(folder / "train.py", folder)
    plain = {"script": "train.py", "args": [], "settings": {}, "host": "lead", "ports": None, "run": "a1", "code": code}
    return {**plain, **changes}


PLACEMENT: Changes = {
    "devices": ["cpu", "cpu"], "machines": [0, 1], "hosts": ["lead", "pc"], "members": ["a", "b"],
    "store": ["127.0.0.1", 1], "machine": 1, "joins": None,
}  # fmt: skip


def heard(connection: Connection) -> Changes:
    while "alive" in (message := connection.read(20.0)):
        pass
    return message


def lead(
    order: Changes, go: Changes = PLACEMENT, between: Callable[[], None] | None = None, **settings: Any
) -> Callable[[Connection], None]:
    """A leader that does not care what it hears, and starts the run."""

    def handle(connection: Connection) -> None:
        connection.send(order=order)
        if "facts" in heard(connection):
            if between is not None:
                between()
            connection.send(go=go, settings=settings)
            heard(connection)

    def until_closed(connection: Connection) -> None:
        with suppress(WireError):
            handle(connection)

    return until_closed


def test_an_honest_leader_is_obeyed(victim: Victim, folder: Path) -> None:
    assert victim.join(lead(order_of(folder, args=["--lr", "1\n\x1b[2J"]), seed=3)) is None
    (order,) = victim.started
    assert order["settings"] == {"seed": 3}
    assert sorted(order["code"]) == ["helper.py", "train.py"]
    assert victim.said[0] == f"lead (127.0.0.1) wants to run here: {folder}/train.py --lr '1\\n\\x1b[2J'"


def a_link(folder: Path) -> str:
    (folder / "linked.py").symlink_to(STANDARD)
    return "linked.py"


def a_pipe(folder: Path) -> str:
    os.mkfifo(folder / "pipe.py")
    return "pipe.py"


def made(name: str, *more: str) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        for one in (*more, name):
            (folder / one).parent.mkdir(parents=True, exist_ok=True)
            (folder / one).write_text("")
        return name

    return make


SCRIPTS: dict[str, Callable[[Path], str]] = {
    "a whole path": lambda _: str(STANDARD),
    "a way up": lambda folder: f"../{folder.name}/train.py",
    "a way up to the library": lambda folder: os.path.relpath(STANDARD, folder),
    "a link": a_link,
    "a pipe": a_pipe,
    "a device": lambda _: "/dev/zero",
    "a folder": lambda _: ".",
    "a name that is too long": lambda _: "a" * 4000 + ".py",
    "no Python": made("run.sh"),
    "a hidden folder": made(".git/hook.py"),
    "an environment": made("env/lib/tool.py", "env/pyvenv.cfg"),
    "an installed package": made("lib/site-packages/tool.py"),
    "uneven itself": lambda folder: str(Path(joining.__file__)),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_other_script_is_run(victim: Victim, folder: Path, name: str) -> None:
    """The module timeit of the standard library ran code from its arguments, with the rights of who had typed join."""
    script = SCRIPTS[name](folder)
    path = folder / script
    code = {path.name: digest(read_code(path))} if os.path.isfile(path) else {}
    order = order_of(folder, script=script, args=["-n", "1", "import os"], code=code)
    found = victim.join(lead(order))
    assert isinstance(found, InputError)
    assert "\n" not in str(found)
    assert victim.started == []


@pytest.mark.parametrize(
    ("module", "script"),
    [("timeit", str(STANDARD)), ("json.tool", "train.py"), ("project.train", "train.py"), ("train.train", "train.py")],
)
def test_no_other_module_is_run(victim: Victim, folder: Path, module: str, script: str) -> None:
    order = order_of(folder, script=script, module=module, args=["import os"])
    assert isinstance(victim.join(lead(order)), InputError)
    assert victim.started == []


@pytest.mark.parametrize("code", [{}, {"train.py": "00"}, {"train.py": "unreadable: no"}])
def test_a_leader_cannot_skip_the_comparison(victim: Victim, folder: Path, code: Changes) -> None:
    found = victim.join(lead(order_of(folder, code=code)))
    assert "differs from the leader's" in str(found)
    assert victim.started == []


def test_what_was_named_alone_is_run(victim: Victim, folder: Path) -> None:
    (folder / "other.py").write_text("")
    assert victim.join(lead(order_of(folder)), script=Path("other.py")) is None
    assert [Path(order["path"]).name for order in victim.started] == ["other.py"]


@pytest.mark.parametrize("name", ["train.py", "helper.py"])
def test_what_changes_after_the_comparison_is_not_run(victim: Victim, folder: Path, name: str) -> None:
    found = victim.join(lead(order_of(folder), between=lambda: (folder / name).write_text("import os\n") and None))
    assert "has changed since" in str(found)
    assert victim.started == []


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "changes",
    [
        {"script": ["train.py"]}, {"script": 3}, {"script": ""}, {"script": "a\0b"}, {"script": None},
        {"args": "text"}, {"args": [1]}, {"args": {}}, {"args": ["a"] * 10_000}, {"args": ["\0"]}, {"args": nested(99)},
        {"module": ["os"]}, {"module": "../os"}, {"module": "os; x"},
        {"settings": []}, {"settings": {"seed": {}}}, {"settings": {"../x": 1}}, {"settings": {"out": nested(50)}},
        {"host": ["lead"]}, {"host": {}}, {"ports": 5}, {"ports": [1]}, {"ports": [0, 99999]}, {"ports": ["1", "2"]},
        {"run": "../../run"}, {"run": ["a"]}, {"code": []}, {"code": {"train.py": 1}}, {"code": nested(900)},
    ],
    ids=lambda changes: repr(changes)[:40],
)  # fmt: skip
def test_an_order_with_a_bad_field_ends_the_connection(victim: Victim, folder: Path, changes: Changes) -> None:
    found = victim.join(lead(order_of(folder, **changes)))
    assert isinstance(found, RankError)
    assert "bad message: order has" in str(found)
    assert victim.started == []


@pytest.mark.parametrize(
    "changes",
    [
        {"machine": 7}, {"machine": "1"}, {"machines": [0]}, {"machines": [1, 0]}, {"hosts": []},
        {"hosts": [["a"], "b"]},
        {"members": [1, 2]}, {"store": ["example.org", 1]}, {"store": 5}, {"store": ["127.0.0.1", 1.5]}, {"joins": "x"},
        {"devices": ["cpu", "cuda:x"]}, {"devices": "cpu,cpu"}, {"devices": ["cpu", "cpu@0.5"]},
    ],
    ids=repr,
)  # fmt: skip
def test_a_start_with_a_bad_field_starts_nothing(victim: Victim, folder: Path, changes: Changes) -> None:
    found = victim.join(lead(order_of(folder), {**PLACEMENT, **changes}))
    assert isinstance(found, InputError | RankError)
    assert victim.started == []


@pytest.mark.parametrize("line", [b"[" * 900_000, b"{" * 5, b"x" * (1 << 20) + b"y", b'{"order": 1' + b"0" * 5000])
def test_a_line_that_is_no_message_ends_the_connection(victim: Victim, line: bytes) -> None:
    found = victim.join(lambda connection: connection.sock.sendall(line + b"\n"))
    assert isinstance(found, RankError)


def test_the_environment_and_unknown_fields_are_this_machines_own(victim: Victim, folder: Path) -> None:
    evil = {"LD_PRELOAD": "/evil.so", "PYTHONPATH": "/evil", "PYTHONSTARTUP": "/evil.py"}
    order = order_of(folder, env=evil, environ=evil, variables=[evil], path="/evil.py", plan=evil)
    assert victim.join(lead(order, {**PLACEMENT, "env": evil, "cores": evil})) is None
    assert "evil" not in repr(victim.started)
    found = victim.join(lead(order, env="LD_PRELOAD=/evil.so"))
    assert isinstance(found, InputError), "no setting has this name"


@pytest.mark.parametrize("out", ["../elsewhere", "/elsewhere", "link/run"])
def test_a_folder_for_results_is_below_this_one(victim: Victim, folder: Path, out: str) -> None:
    (folder / "link").symlink_to(folder.parent)
    assert victim.join(lead(order_of(folder), out=out)) is None
    assert victim.join(lead(order_of(folder), out="runs/mine")) is None
    outside, inside = victim.started
    assert (outside["closed"], inside["closed"]) == (str(Path(out).resolve()), None)


def test_a_closed_folder_is_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from uneven import files

    monkeypatch.setattr(files, "_closed", [])
    files.close_folder(tmp_path / "out")
    assert is_closed(tmp_path / "x" / ".." / "out" / "step-1")
    with pytest.raises(InputError, match="in which uneven join was typed"):
        files.make_out_folder(tmp_path / "out")
    with pytest.raises(PermissionError):
        files.write_atomically(tmp_path / "out" / "state.json", b"")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "message",
    [
        {"status": []}, {"status": {"ranks": [1]}}, {"give_up": -1}, {"give_up": "0"}, {"end": [], "code": 0},
        {"end": "", "code": "x"}, {"end": ""}, {"answer": "../../x", "left": ""}, {"answer": ["x"]},
        {"reach": [["a", "example.org", 1]], "machine": 0}, {"reach": [[1, 2]], "machine": 0}, {"reach": []},
        {"reach": [["a", "::1", 1]]}, {"go": PLACEMENT}, {"refused": {}}, {"dropped": 1},
    ],
    ids=repr,
)  # fmt: skip
def test_what_a_leader_says_later_is_looked_at_too(message: Changes) -> None:
    with pytest.raises(WireError, match="bad message"):
        checked(message, FROM_LEADER)


def test_what_people_read_moves_no_terminal() -> None:
    found = checked({"refused": "no\n\x1b]0;evil\x07\u202e\ud800", "status": {"out": "a\nb", "ranks": []}}, FROM_LEADER)
    assert found["refused"] == "no\n\\x1b]0;evil\\x07\\u202e\\ud800"
    assert found["status"]["out"] == "a\\nb"
    found["refused"].encode()


def test_the_top_of_an_environment_may_be_a_project(folder: Path) -> None:
    (folder / "pyvenv.cfg").touch()
    assert find_permitted({**order_of(folder), "module": None}, None).path == folder / "train.py"


@pytest.fixture
def leader() -> Iterator[Leader]:
    made = Leader()
    yield made
    made.door.close()


BAD_FACTS: tuple[Changes, ...] = (
    {"code": []}, {"code": {"train.py": 3}}, {"code": "x"}, {"code": nested(900)}, {"devices": []}, {"devices": "cpu"},
    {"devices": [{"device": "cuda:x", "precisions": []}]}, {"devices": [{"device": ["cpu"], "precisions": []}]},
    {"devices": [{"device": "cpu", "precisions": "fp32"}]}, {"devices": [3]}, {"uneven": "1"}, {"uneven": {}},
    {"clock": "now"}, {"clock": None}, {"memory_available_bytes": "much"}, {"disk_free_bytes": -1}, {"torch": ["2"]},
)  # fmt: skip


@pytest.mark.parametrize("facts", BAD_FACTS, ids=lambda facts: repr(facts)[:40])
def test_malformed_facts_end_their_connection_alone(leader: Leader, facts: Changes) -> None:
    """They raised in the leader; the machine that fits is taken in."""
    gathering = leader.gather(replace(OPTIONS, fewest=2, most=2))
    evil = leader.join("evil")
    assert "order" in heard(evil)
    evil.send(facts={**stamped({"devices": [{"device": "cpu", "precisions": ["fp32"]}]}), **facts}, port=7000)
    while not (lines := [line for line in leader.said if "evil" in line]):
        time.sleep(0.01)
    good = leader.join("good")
    bring(good)
    (node,) = gathering.wait()
    assert node.host == "good"
    assert len(lines) == 1
    assert "bad message: facts has" in lines[0]
    for connection in (evil, good):
        connection.close()


@pytest.mark.parametrize(
    "hello", [{"host": ["evil"]}, {"version": {}}, {"host": None}, {"role": "node"}], ids=lambda hello: repr(hello)
)
def test_a_bad_greeting_is_one_line(leader: Leader, hello: Changes) -> None:
    gathering = leader.gather(replace(OPTIONS, fewest=2, wait=0.2))
    connection = leader.join("x")
    heard(connection)
    from uneven.machines.door import knock

    evil = knock("127.0.0.1", leader.door.port, TOKEN, 10.0)
    whole = {"role": "node", "version": "1", "host": "evil"}
    evil.send(**(hello if set(hello) == {"role"} else {**whole, **hello}))
    with pytest.raises(WireError):
        heard(evil)
    assert sum("was sent away: it sent a bad message" in line for line in leader.said) == 1
    gathering.close()
    connection.close()


def test_a_hostile_name_is_shown_and_not_obeyed(leader: Leader) -> None:
    gathering = leader.gather()
    connection = leader.join("pc\r\x1b[2Juneven: all is well")
    bring(connection)
    (node,) = gathering.wait()
    assert node.host == "pc\\r\\x1b[2Juneven: all is well"
    connection.close()


@pytest.fixture
def joined(leader: Leader, tmp_path: Path) -> Iterator[Joined]:
    made = Joined(leader, tmp_path)
    yield made
    made.connection.close()
    made.node.session.close()


@pytest.mark.parametrize(
    "message",
    [
        {"codes": "none"}, {"codes": [0, "1"]}, {"codes": [0, 0, 0]}, {"codes": [10**9, 0]}, {"codes": {}},
        {"stopped": [7]}, {"stopped": [-1]}, {"stopped": 1}, {"unused": [5]}, {"unused": ["../x"]}, {"stop": "x"},
        {"errors": []}, {"errors": {"7": {}}}, {"errors": {"-1": {}}}, {"errors": {"0": []}}, {"errors": {"../0": {}}},
        {"errors": {"0": {"what": 3}}}, {"errors": {"0": {"slot": "x"}}}, {"errors": {"0": {"time": []}}},
        {"leave": ["x"]}, {"leave": "../x"}, {"leave": "x", "ranks": "all"}, {"leave": "x", "ranks": ["0"]},
    ],
    ids=lambda message: repr(message)[:40],
)  # fmt: skip
def test_a_rank_that_lies_loses_its_machine_alone(joined: Joined, tmp_path: Path, message: Changes) -> None:
    joined.connection.send(**message)
    while joined.node.session.why_lost is None:
        joined.ranks.exit_codes()
    assert set(joined.ranks.lost()) == {1, 2}
    assert "\n" not in joined.ranks.lost()[1]
    assert list(tmp_path.iterdir()) == []


def test_requests_without_end_are_cut(joined: Joined) -> None:
    with suppress(WireError):
        for number in range(300):
            joined.connection.send(leave=f"leave-{number}")
    while joined.node.session.why_lost is None:
        joined.ranks.exit_codes()
    assert "more than 64" in joined.node.session.why_lost


@pytest.mark.parametrize(
    "request_",
    [
        {"do": "get", "key": "k", "name": ["state.json"]}, {"do": ["get"]}, {"do": "put", "key": {}, "name": 1},
        {"do": "share", "key": "k", "folder": "/x", "names": [[1]], "places": []},
        {"do": "give up", "key": "k", "partial": [], "rank": True, "why": {}},
    ],
    ids=repr,
)  # fmt: skip
def test_a_bad_request_for_files_is_one_line(leader: Leader, request_: Changes) -> None:
    """A name that is a list ended the thread of the leader with a traceback."""
    from uneven.machines.door import knock

    evil = knock("127.0.0.1", leader.door.port, TOKEN, 10.0)
    evil.send(role="files", **request_)
    assert "bad message" in heard(evil)["refused"]
    with pytest.raises(WireError):
        heard(evil)
    assert len(leader.said) == 1


def test_a_lie_about_links_is_about_itself(leader: Leader) -> None:
    from uneven.launch.nodes.lead import _reached

    gathering = leader.gather()
    connection = leader.join("pc")
    assert "order" in heard(connection)
    from tests.launch.nodes.leaders import FACTS

    send_facts(connection, FACTS)
    (node,) = gathering.wait()
    connection.send(reached={"machine": 0, "links": [{"to": 0, "error": "no\x1b[2J"}], "heard": []})
    assert _reached(node, 1) == {"machine": 1, "links": [{"to": 0, "error": "no\\x1b[2J"}], "heard": []}
    connection.close()
