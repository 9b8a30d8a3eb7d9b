"""Runs over two machines that share no folder, saved, stopped, resumed and repeated; the ranks are threads.

Rank 0 is on lab-a, the others on lab-b, where lab-a's folder is not there (`hide`).
"""

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.machines.plain_door import PlainDoor, plain_door
from tests.ranks import Silent, ThreadGroup, on_threads
from tests.train.exact_runs import OPTIMIZERS, mean_loss
from tests.train.resumed_runs import CADENCE, DATA, EXACT, Net, StopAt, assert_same, one_cycle
from uneven.comm.store import open_store
from uneven.config import Task, resolve
from uneven.errors import InputError
from uneven.hardware.device import parse_devices
from uneven.hardware.roster import Roster
from uneven.launch import membership
from uneven.launch.checks import preflight, resume
from uneven.launch.context import ProcessContext
from uneven.launch.environment import LaunchEnvironment
from uneven.launch.training import collect
from uneven.results import saver
from uneven.results.checkpoint import RankPart, read_checkpoint
from uneven.results.state import TrainedState
from uneven.train.requests import Requests

SAME = {"balanced": {**EXACT, "shares": (5, 2, 2)}, "cadence": {**CADENCE, "shares": (3, 1, 1)}}
_local = threading.local()


class Lines(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, lines: Any) -> None:
        self.lines += lines


class Lab:
    """`train` is a run of three ranks; `refused` what each of them raised, `lines` what each was told."""

    def __init__(self, home: Path, door: PlainDoor | None) -> None:
        self.a, self.b, self.door = home / "a", home / "b", door
        self.machines = (0, 1, 1)
        self.lines: list[list[str]] = []
        self.refused: list[str] = []

    def train(self, callbacks: Any = lambda _: (), other: Any = (), **changes: Any) -> TrainedState:
        """Ranks of lab-b get paths that are not there, and the settings `other` beside."""
        store, port = open_store()
        stop = threading.Event()
        reports, self.refused = [Lines() for _ in range(3)], ["", "", ""]

        def rank(group: ThreadGroup) -> TrainedState:
            _local.rank, _local.is_elsewhere = group.rank, self.machines[group.rank] > 0
            elsewhere = {"out": Path("/not/here")} if _local.is_elsewhere and changes.get("out") else {}
            config = resolve(
                {"batch_size": 8, "epochs": 3, "seed": 3, "lr_scale": 1.0, "progress": "off", **changes}
                | elsewhere
                | (dict(other) if group.rank else {})
            )
            own = tuple(callbacks(stop))
            task = Task(Net, OPTIMIZERS["adam"], mean_loss, DATA, one_cycle, None, callbacks=own)
            context = self._context(group.rank, port)
            _local.group = group
            try:
                prepared = preflight.prepare(task, config, context)
                if prepared.finished is not None:
                    return prepared.finished
                requests = Requests()
                requests.stop = stop
                report = reports[group.rank]
                worker = context.make_worker(task, prepared.config, prepared.devices, requests, report)
                return collect(group, worker.train(), worker.axis)
            except InputError as error:
                self.refused[group.rank] = str(error)
                raise
            finally:
                context.leave_group()

        try:
            self.states = on_threads(3, rank)
            return self.states[0]
        finally:
            self.lines = [report.lines for report in reports]
            del store
            assert not self.b.exists() or list(self.b.iterdir()) == [], "something stays on lab-b"

    def _context(self, rank: int, port: int) -> ProcessContext:
        roster = Roster(parse_devices("cpu,cpu,cpu"), self.machines, ("lab-a", "lab-b")[: 1 + max(self.machines)])
        door = None if self.door is None else self.door.door
        here = roster.local_ranks(rank)
        environment = LaunchEnvironment(
            *("uneven run", rank, 3, here.index(rank), len(here)),
            host="127.0.0.1",
            port=port,
            door=door,
            address="127.0.0.1",
        )
        context = ProcessContext(environment, roster)
        if self.door is not None:
            context.leader = self.door.reach(self.b)
        return context


@pytest.fixture
def make_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Lab]]:
    """Labs with or without a door; `is_shared`: lab-b sees the folder of lab-a."""
    monkeypatch.setattr(membership, "form_group", lambda *_, **__: _local.group)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    with plain_door() as door:

        def make(has_door: bool = True, is_shared: bool = False) -> Lab:
            lab = Lab(tmp_path, door if has_door else None)
            lab.a.mkdir()
            if not is_shared:
                hide(lab.a, monkeypatch)
            return lab

        yield make


def hide(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From threads that are elsewhere; they may neither write there."""
    exists, read_bytes, open_file, mkdir = Path.exists, Path.read_bytes, Path.open, Path.mkdir

    def is_hidden(path: Path) -> bool:
        return getattr(_local, "is_elsewhere", False) and path.is_relative_to(folder)

    def guarded(action: Callable[..., Any]) -> Callable[..., Any]:
        def act(path: Path, *args: Any, **options: Any) -> Any:
            if is_hidden(path):
                raise FileNotFoundError(2, "No such file or directory", str(path))
            return action(path, *args, **options)

        return act

    write = saver.write_rank_part

    def write_where_it_belongs(partial: Path, rank: int, part: RankPart) -> None:
        assert partial.absolute().is_relative_to(folder) == (rank == 0), f"rank {rank} writes to {partial}"
        write(partial, rank, part)

    monkeypatch.setattr(saver, "write_rank_part", write_where_it_belongs)  # called by threads of the saver
    monkeypatch.setattr(Path, "exists", lambda path, **o: not is_hidden(path) and exists(path, **o))
    for name, action in {"read_bytes": read_bytes, "open": open_file, "mkdir": mkdir}.items():
        monkeypatch.setattr(Path, name, guarded(action))


@pytest.mark.parametrize("policy", list(SAME))
def test_saved_and_resumed_runs_are_those_without_a_break(policy: str, make_lab: Callable[..., Lab]) -> None:
    lab = make_lab()
    out = lab.a / "run"
    whole = lab.train(out=out, save_every="4 steps", resume="auto", **SAME[policy])
    names = sorted(path.name for path in out.iterdir())
    assert names == sorted({".uneven", "step-4", "step-8", f"step-{whole.slot}"} | set(_steps(whole.slot)))
    assert len(read_checkpoint(out / "step-4").ranks) == 3
    assert [lines for lines in lab.lines if "not saved" in " ".join(lines)] == []
    for folder in _steps(whole.slot):  # killed after the first checkpoint
        if folder != "step-4":
            shutil.rmtree(out / folder)
    again = lab.train(out=out, save_every="4 steps", resume="auto", **SAME[policy])
    assert_same(again, whole)
    for name, value in whole.optimizer.items():
        assert name.startswith("random") or torch.equal(again.optimizer[name], value), name
    assert (again.log, again.rounds) == (whole.log, whole.rounds)
    named = lab.train(
        resume=out / "step-8", save_every="4 steps", other={"resume": Path("/not/here/step-8")}, **SAME[policy]
    )
    assert_same(named, whole)
    whole.save(out)
    finished = lab.train(out=out, resume="auto", **SAME[policy])
    assert finished.folder == out
    for state in lab.states:
        assert_same(state, whole)


def _steps(slots: int) -> list[str]:
    return [f"step-{slot}" for slot in (*range(4, slots, 4), slots)]


def test_a_stopped_run_goes_on(make_lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch) -> None:
    lab = make_lab()
    monkeypatch.chdir(lab.a)
    options = SAME["balanced"]
    whole = lab.train(**options)
    stopped = lab.train(callbacks=lambda stop: [StopAt(5, stop)], **options)
    assert not stopped.finished
    (folder,) = (lab.a / "runs").glob("interrupted-*/step-*")
    assert stopped.checkpoint is not None
    assert stopped.checkpoint.resolve() == folder
    again = lab.train(resume=folder, **options)
    for name, value in whole.params.items():  # buffers were averaged once more
        assert torch.equal(again.params[name], value), name


def test_a_replay_takes_the_log_of_rank_0(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab()
    options = {**CADENCE}
    first = lab.train(out=lab.a / "run", **options)
    first.save(lab.a / "run")
    again = lab.train(replay=lab.a / "run", other={"replay": Path("/not/here")}, **options)
    assert_same(again, first)
    with pytest.raises(InputError):
        lab.train(replay=lab.a / "none", other={"replay": Path("/not/here")}, **options)
    assert len(set(lab.refused)) == 1
    assert "there is no log.json in it" in lab.refused[0]


def test_rank_0s_reason_not_to_resume_is_everybodys(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab()
    with pytest.raises(InputError):
        lab.train(resume=lab.a / "none", **EXACT)
    assert len(set(lab.refused)) == 1
    assert "there is no such folder" in lab.refused[0]
    with pytest.raises(InputError):
        lab.train(resume=lab.a / "none", other={"resume": None}, **EXACT)
    assert "was given other settings than rank 0" in lab.refused[0]


@pytest.mark.parametrize("machines", [(0, 0, 0), (0, 0, 1)])
def test_nothing_is_moved_aside_before_all_ranks_have_read_it(
    machines: tuple[int, ...], make_lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = make_lab(has_door=False, is_shared=True)
    lab.machines = machines
    out = lab.a / "run"
    lab.train(out=out, save_every="4 steps", **SAME["balanced"]).save(out)
    moved, readers = threading.Event(), set[int]()
    go_on, read = preflight.go_on_in_folder, resume.read_checkpoint

    def move(*given: Any) -> list[str]:
        moved.set()
        return go_on(*given)

    def read_slowly(*given: Any) -> Any:
        if _local.rank > 0:
            readers.add(_local.rank)
            assert not moved.wait(0.2), "a rank reads what is moved"
        return read(*given)

    monkeypatch.setattr(preflight, "go_on_in_folder", move)
    monkeypatch.setattr(resume, "read_checkpoint", read_slowly)
    longer = lab.train(out=out, save_every="4 steps", resume="auto", epochs=4, **SAME["balanced"])
    assert longer.finished
    assert moved.is_set()
    assert readers == {1, 2}


def test_a_part_that_does_not_arrive_costs_the_save_and_names_the_host(
    make_lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = make_lab()
    assert lab.door is not None
    put, failed = type(lab.door.service)._put, threading.Event()

    def fail_once(service: Any, connection: Any, message: dict[str, Any]) -> None:
        if ".step-4." in message["partial"] and not failed.is_set():
            failed.set()
            connection.send(go=True)
            raise ConnectionResetError
        put(service, connection, message)

    monkeypatch.setattr(type(lab.door.service), "_put", fail_once)
    state = lab.train(out=lab.a / "run", save_every="4 steps", **SAME["balanced"])
    assert state.finished
    (line,) = [line for line in lab.lines[0] if "not saved" in line]
    assert "on lab-b" in line
    assert line.startswith(f"checkpoint {lab.a / 'run/step-4'} is not saved: ")
    assert line.endswith("training is not affected, there is no whole checkpoint yet")
    assert sorted(path.name for path in (lab.a / "run").iterdir()) == sorted([".uneven", *_steps(state.slot)[1:]])


@pytest.mark.parametrize("is_shared", [True, False])
def test_without_a_leader_the_machines_need_a_folder_in_common(is_shared: bool, make_lab: Callable[..., Lab]) -> None:
    lab = make_lab(has_door=False, is_shared=is_shared)
    out, options = lab.a / "run", {**SAME["balanced"], "save_every": "4 steps"}
    if is_shared:
        whole = lab.train(out=out, **options)
        assert sorted(path.name for path in out.iterdir()) == sorted([".uneven", *_steps(whole.slot)])
        assert_same(lab.train(resume=out / "step-4", **options), whole)
        return
    with pytest.raises(InputError):
        lab.train(out=out, **options)
    assert len(set(lab.refused)) == 1
    assert lab.refused[0].startswith(f"save_every='4 steps': lab-b does not see {out} of lab-a, ")
    assert "uneven join" in lab.refused[0]
    del options["save_every"]
    state = lab.train(out=out, **options)
    assert state.finished
    (line,) = [line for line in lab.lines[0] if "Ctrl-C" in line]
    assert "lab-b does not see" in line
    stopped = lab.train(callbacks=lambda stop: [StopAt(5, stop)], out=out, overwrite=True, **options)
    assert (stopped.finished, stopped.checkpoint) == (False, None)
    assert "no checkpoint is saved: lab-b does not see" in lab.lines[0][-1]
    assert [path.name for path in out.iterdir()] == [".uneven"]


def test_without_a_leader_all_refuse_a_checkpoint_that_one_machine_does_not_see(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab(has_door=False)
    lab_with_door = Lab(lab.a.parent, None)
    lab_with_door.a = lab.a
    with plain_door() as door:
        lab_with_door.door = door
        lab_with_door.train(out=lab.a / "run", save_every="4 steps", **SAME["balanced"])
    with pytest.raises(InputError):
        lab.train(resume=lab.a / "run/step-4", **SAME["balanced"])
    assert len(set(lab.refused)) == 1
    assert lab.refused[0].startswith(f"lab-b does not see {lab.a / 'run/step-4'} of lab-a, which resume=... needs; ")


def test_a_leader_that_does_not_answer_is_a_reason(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab()
    with plain_door() as gone:
        lab.door = gone
    with pytest.raises(InputError):
        lab.train(out=lab.a / "run", save_every="4 steps", **SAME["balanced"])
    assert len(set(lab.refused)) == 1
    assert "the leader does not take the parts of other machines" in lab.refused[0]
