"""Ranks whose shards nobody has a copy of are lost: the others go back to a checkpoint, and end as one process does.

On threads, with real workers; tests/launch/test_roll_back.py has the same with a process that is really killed.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.clusters import Begun, DiedError, FakeMembership, Loss, LossyGroup, on_lossy_threads
from tests.train.elastic.lossy_runs import ways
from tests.train.elastic.lossy_sharded_runs import Blocks, Deep, check
from tests.train.exact_runs import OPTIMIZERS, X, Y, make_muon, mean_loss
from uneven.config import SHARDED, Task, resolve
from uneven.data.tensors import TensorData
from uneven.errors import RefusedError
from uneven.launch.training import collect
from uneven.results.state import TrainedState
from uneven.step.loss import LossMeter
from uneven.train.callbacks import CallbackInfo
from uneven.train.rank_info import RankInfo
from uneven.train.requests import Requests
from uneven.train.settle import exchange_losses
from uneven.train.worker import Worker

NAMES = ("zero1", "zero2", "fsdp")
EVERY = 2


class Saved:
    """Notes the collectives at which a checkpoint was whole; all ranks wait for it, since it has on_save."""

    def __init__(self, group: LossyGroup, damage: frozenset[str]) -> None:
        self.places: list[int] = []
        self._group, self._damage = group, damage

    def on_save(self, info: CallbackInfo) -> None:
        if self._group.number == 0:
            self.places.append(self._group.started[0])
            if info.is_lead and info.path is not None and info.path.name in self._damage:
                (info.path / "state.safetensors").write_bytes(b"nothing")


def train(
    out: Path,
    size: int,
    losses: list[Loss],
    failing: list[str] | None = None,
    damage: list[str] | None = None,
    *,
    is_muon: bool = False,
    **more: Any,
) -> tuple[dict[str, Any], Any]:
    shares = (3.0, 2.0, 1.0, 2.0)[:size]
    settings = {"batch_size": 12, "epochs": 2, "seed": 3, "global_batch_size": 30, "max_grad_norm": 0.5}
    if size > 1:
        settings |= {"shares": shares, "save_every": f"{EVERY} steps", "out": out}
        settings |= {"memory_shares": shares[::-1]} if more.get("strategy") in SHARDED else {}
    config = resolve({**settings, "policy": "balanced" if size > 1 else "sync", **more})
    scheduler = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)  # noqa: E731

    def rank(info: RankInfo, group: LossyGroup, membership: FakeMembership) -> tuple[TrainedState, Worker, list[int]]:
        saved = Saved(group, frozenset(damage or ()))
        data = TensorData(X.double(), Y)
        model, optimizer = (Deep, make_muon) if is_muon else (Blocks, OPTIMIZERS["adam"])
        task = Task(model, optimizer, mean_loss, data, scheduler, callbacks=(saved,))
        worker = Worker(task, config, info, lambda _: group, Requests(), Begun(group))
        worker.use_membership(membership)
        result = worker.train()
        return worker.finish(lambda: collect(worker.group, result, worker.axis)), worker, saved.places

    found, leader = on_lossy_threads(size, losses, rank, failing=failing or [])
    assert failing or set(found) == {f"m{n}" for n in range(size)} - {loss.victim for loss in losses}, losses
    return found, leader


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> TrainedState:
    ((state, _, _),) = train(tmp_path_factory.mktemp("alone"), 1, [])[0].values()
    return state


def check_all(found: dict[str, Any], alone: TrainedState) -> list[dict[str, Any]]:
    """Params, optimizer state, samples and rates; returns the segments, which all know alike."""
    check({member: (state, worker) for member, (state, worker, _) in found.items()}, alone)
    states = [state for state, _, _ in found.values()]
    assert all(state.segments == states[0].segments for state in states)
    assert [entry["lr"] for entry in states[0].history] == [entry["lr"] for entry in alone.history]
    assert [entry["step"] for entry in states[0].history] == [entry["step"] for entry in alone.history]
    return states[0].segments


def places(out: Path, name: str | None, size: int, **more: Any) -> tuple[range, list[int]]:
    """The collectives of a run without a loss after its first checkpoint, and those after which one was whole."""
    found, leader = train(out, size, [], strategy=name, **more)
    saved = found["m0"][2]
    return range(saved[0], leader.collectives[0]), saved


@pytest.mark.parametrize(
    ("name", "step"), [("fsdp", 251), *(pytest.param(name, 1, marks=pytest.mark.soak) for name in NAMES)]
)
@pytest.mark.timeout(900)
def test_a_rank_without_copies_is_lost(name: str, step: int, alone: TrainedState, tmp_path: Path) -> None:
    later, saved = places(tmp_path / "plain", name, 3)
    backs = 0
    for number, (place, (after, blind)) in enumerate(list(itertools.product(later, ways(("m0", "m2"))))[::step]):
        found, _ = train(tmp_path / f"{number}", 3, [Loss("m1", place, after=after, blind=blind)], strategy=name)
        last = check_all(found, alone)[-1]
        if "checkpoint" in last:
            backs += 1
            losses = [entry["train_loss"] for entry in alone.history]
            assert [entry["train_loss"] for entry in found["m0"][0].history] == pytest.approx(losses, abs=1e-10)
            assert last["slot"] % EVERY == 0
            assert last["again_samples"] <= EVERY * 30
        else:
            assert place >= saved[-1], "only when the run is over nobody is missed"
    assert backs


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.timeout(900)
def test_another_one_is_lost_while_the_others_go_back(name: str, alone: TrainedState, tmp_path: Path) -> None:
    """Rank 0, which chooses the checkpoint: some have gone back then, and some have not."""
    _, saved = places(tmp_path / "plain", name, 4)
    first = Loss("m1", saved[1] + 3, after=True, blind=frozenset({"m3"}))
    _, leader = train(tmp_path / "first", 4, [first], strategy=name)
    cases = list(itertools.product(range(leader.collectives[1]), ways(("m2", "m3"))))
    for number, (place, (after, blind)) in enumerate(cases):
        losses = [first, Loss("m0", place, 1, after, blind)]
        check_all(train(tmp_path / f"{number}", 4, losses, strategy=name)[0], alone)


@pytest.mark.parametrize(
    ("damaged", "slot"),
    [
        pytest.param(["step-4"], 2, id="newest"),
        pytest.param(["step-2", "step-4"], None, id="all", marks=pytest.mark.soak),
    ],
)
def test_a_damaged_checkpoint_is_passed_over(
    damaged: list[str], slot: int | None, alone: TrainedState, tmp_path: Path
) -> None:
    _, saved = places(tmp_path / "plain", "fsdp", 3)
    loss, out = Loss("m1", saved[1] + 3), tmp_path / "out"
    if slot is None:
        found, leader = train(out, 3, [loss], failing=["m0", "m2"], damage=damaged, strategy="fsdp")
        assert not found
        for member in ("m0", "m2"):
            assert isinstance(leader.failures[member], RefusedError)
            assert "m1 had a part of the model" in str(leader.failures[member])
            assert "step-4: state.safetensors is damaged" in str(leader.failures[member])
        return
    found, _ = train(out, 3, [loss], damage=damaged, strategy="fsdp")
    last = check_all(found, alone)[-1]
    assert (last["checkpoint"], last["slot"], last["again_samples"]) == ("step-2", 2, 40)
    lines = found["m0"][1].membership.lines
    assert [line.partition(":")[0] for line in lines] == ["  passed over", "  step-2"]


def test_without_a_checkpoint_all_end_with_the_same_words(tmp_path: Path) -> None:
    _, leader = train(tmp_path / "plain", 3, [], strategy="zero2")
    _, leader = train(tmp_path, 3, [Loss("m1", leader.begun + 2)], failing=["m0", "m2"], strategy="zero2")
    for member in ("m0", "m2"):
        assert "redundancy=1 keeps a copy of every shard, save_every=" in str(leader.failures[member])


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_a_rank_and_the_keeper_of_its_copy_are_lost(name: str, alone: TrainedState, tmp_path: Path) -> None:
    """In a ring of three each keeps a copy of another one's: with two of them a shard is lost."""
    _, saved = places(tmp_path / "plain", name, 3, redundancy=1)
    losses = [Loss("m1", saved[0] + 5), Loss("m2", 0, 1)]
    found, _ = train(tmp_path / "out", 3, losses, strategy=name, redundancy=1)
    assert check_all(found, alone)[-1]["checkpoint"] == "step-2"


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_one_rank_is_left(name: str, alone: TrainedState, tmp_path: Path) -> None:
    later, _ = places(tmp_path / "plain", name, 2)
    found, _ = train(tmp_path / "out", 2, [Loss("m0", later[len(later) // 2])], strategy=name)
    assert "checkpoint" in check_all(found, alone)[-1]


@pytest.mark.soak
def test_a_resumed_run_goes_back_to_where_it_began(alone: TrainedState, tmp_path: Path) -> None:
    train(tmp_path / "first", 3, [], strategy="fsdp")
    more = {"resume": tmp_path / "first" / "step-2", "save_every": "1000 steps", "strategy": "fsdp"}
    _, leader = train(tmp_path / "plain", 3, [], **more)
    loss = Loss("m2", (leader.begun + leader.collectives[0]) // 2)
    found, _ = train(tmp_path / "out", 3, [loss], **more)
    assert check_all(found, alone)[-1]["checkpoint"] == "step-2"


def test_a_stop_that_was_asked_for_after_the_checkpoint_has_not_been(
    monkeypatch: pytest.MonkeyPatch, alone: TrainedState, tmp_path: Path
) -> None:
    """A callback asks again where the step is trained again, or has another reason not to."""
    asked: dict[int, int] = {}  # by callback: the collective in which the others would hear of it

    def stop_once(saved: Saved, info: CallbackInfo) -> None:
        if info.step == EVERY + 1 and id(saved) not in asked:
            asked[id(saved)] = saved._group.started[0]
            info.stop()

    monkeypatch.setattr(Saved, "on_step", stop_once, raising=False)
    stopped, _ = train(tmp_path / "plain", 3, [], strategy="fsdp")
    assert {state.stopped for state, _, _ in stopped.values()} == {"Saved asked for it"}
    (place,) = {*asked.values()}
    found, _ = train(tmp_path / "out", 3, [Loss("m1", place)], strategy="fsdp")
    assert check_all(found, alone)[-1]["checkpoint"] == "step-2"


def test_another_one_is_lost_when_the_others_have_just_gone_back(
    monkeypatch: pytest.MonkeyPatch, alone: TrainedState, tmp_path: Path
) -> None:
    """In their first exchange after that: none of them must tell of its steps before it went back."""
    _, saved = places(tmp_path / "plain", "fsdp", 4)

    def dying(meter: LossMeter, group: LossyGroup) -> None:
        if (group.member, group.number) == ("m0", 1):
            raise DiedError
        exchange_losses(meter, group)

    monkeypatch.setattr("uneven.train.settler.exchange_losses", dying)
    found, _ = train(tmp_path / "out", 4, [Loss("m1", saved[1] + 3)], failing=["m0"], strategy="fsdp")
    assert set(found) == {"m2", "m3"}
    assert [segment.get("checkpoint") for segment in check_all(found, alone)][-2:] == ["step-4", None]


MUON_STRATEGIES = (None, "zero1", "ddp-flat")  # the last sums gradients before MuonAdamW updates


@pytest.fixture
def muon_alone(muon_in_fp64: None, tmp_path: Path) -> TrainedState:
    ((state, _, _),) = train(tmp_path / "alone", 1, [], is_muon=True)[0].values()
    return state


@pytest.mark.parametrize("name", MUON_STRATEGIES)
@pytest.mark.parametrize("step", [pytest.param(97, id="some"), pytest.param(1, id="all", marks=pytest.mark.soak)])
@pytest.mark.timeout(900)
def test_a_rank_of_a_muon_is_lost(name: str | None, step: int, muon_alone: TrainedState, tmp_path: Path) -> None:
    """Each rank owns something of it, and nobody has a copy."""
    later, saved = places(tmp_path / "plain", name, 3, is_muon=True)
    backs = 0
    for number, (place, (after, blind)) in enumerate(list(itertools.product(later, ways(("m0", "m2"))))[::step]):
        loss = Loss("m1", place, after=after, blind=blind)
        last = check_all(train(tmp_path / f"{number}", 3, [loss], is_muon=True, strategy=name)[0], muon_alone)[-1]
        backs += "checkpoint" in last
        assert "checkpoint" in last or place >= saved[-1], "only when the run is over nobody is missed"
    assert backs


@pytest.mark.parametrize("name", MUON_STRATEGIES)
def test_one_rank_of_a_muon_is_left(name: str | None, muon_alone: TrainedState, tmp_path: Path) -> None:
    later, _ = places(tmp_path / "plain", name, 2, is_muon=True)
    found, _ = train(tmp_path / "out", 2, [Loss("m0", later[len(later) // 2])], is_muon=True, strategy=name)
    assert "checkpoint" in check_all(found, muon_alone)[-1]


@pytest.mark.parametrize("sums", [True, False])
@pytest.mark.parametrize("step", [pytest.param(59, id="some"), pytest.param(1, id="all", marks=pytest.mark.soak)])
@pytest.mark.timeout(900)
def test_a_rank_that_owns_nothing_of_a_muon_is_not_missed(
    sums: bool, step: int, muon_alone: TrainedState, tmp_path: Path
) -> None:
    """Nobody goes back, but where a step was interrupted that not all of the others have applied."""
    given: dict[str, Any] = {"shares": (3.0, 0.0, 2.0), "memory_shares": (2.0, 0.0, 1.0), "is_muon": True}
    given |= {} if sums else {"bucket_mb": 1}  # a DDP sums
    later, _ = places(tmp_path / "plain", "zero1", 3, **given)
    backs = []
    for number, (place, (after, blind)) in enumerate(list(itertools.product(later, ways(("m0", "m2"))))[::step]):
        loss = Loss("m1", place, after=after, blind=blind)
        found, _ = train(tmp_path / f"{number}", 3, [loss], strategy="zero1", **given)
        backs.append("checkpoint" in check_all(found, muon_alone)[-1])
    assert not all(backs)


def test_a_muon_without_a_checkpoint_ends_with_the_same_words(muon_in_fp64: None, tmp_path: Path) -> None:
    _, leader = train(tmp_path / "plain", 3, [], is_muon=True)
    _, leader = train(tmp_path / "out", 3, [Loss("m1", leader.begun + 2)], failing=["m0", "m2"], is_muon=True)
    for member in ("m0", "m2"):
        message = str(leader.failures[member])
        assert "save_every=" in message
        assert "redundancy" not in message, "MuonAdamW refuses it"
