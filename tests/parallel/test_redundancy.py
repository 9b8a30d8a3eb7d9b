"""redundancy=1: training is the same bit by bit, and whoever is lost, the others have the whole state of one step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adafactor

from tests.parallel.parity import (
    CLIP,
    OPTIMIZERS,
    SAMPLES,
    STEPS,
    Case,
    Net,
    assert_same_state,
    batches,
    check,
    loss_of,
    train_dense,
    train_on,
)
from tests.ranks import ThreadGroup, on_threads
from uneven.comm.group import Group, SoloGroup
from uneven.comm.work import Traffic, Work
from uneven.errors import GroupLostError
from uneven.parallel.catalog import divide, make_strategy
from uneven.parallel.ddp import Zero1
from uneven.parallel.strategy import FitOptions, FullState, MakeOptimizer
from uneven.parallel.survivors import Survived

NAMES = ("zero1", "zero1-flat", "zero2", "fsdp")
SHARES = (3.0, 2.0, 2.0)
CASE = Case(3, samples="unequal", kind="frozen", optimizer="adamw")


def made(name: str, redundancy: int = 1, shares: tuple[float, ...] | None = SHARES) -> Callable[..., Any]:
    def wrap(model: nn.Module, make: MakeOptimizer, group: Any) -> Any:
        if isinstance(model, Net):  # not all of its layers are called once, and in order
            model.fsdp_units = lambda: [model.inner, model.head]  # type: ignore[assignment]
        return make_strategy(name, model, make, group, shares, redundancy=redundancy)

    return wrap


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("case", "shares"),
    [
        (CASE, SHARES),
        (Case(3, samples="zero", accumulation=2, kind="unused"), (5.0, 0.0, 2.0)),
        (Case(2, samples="unequal", kind="tied", optimizer="adamw"), None),
    ],
)
def test_it_trains_as_one_process_does(name: str, case: Case, shares: tuple[float, ...] | None) -> None:
    check(case, made(name, shares=shares))


@pytest.mark.parametrize("name", ["zero2", "fsdp"])
def test_copies_have_their_sums_where_shards_are_reduced_to_their_owners(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ThreadGroup, "pretends_nccl", True)
    _, one = on_threads(2, lambda group: train_on(Case(2), made(name, shares=(2.0, 1.0)), group))
    assert_same_state(one.state, train_dense(Case(2)).state)


@pytest.mark.parametrize("name", NAMES)
def test_it_changes_no_bit_and_every_copy_is_its_owners(name: str) -> None:
    own, copies = divide(SHARES, _Three(), 1)
    assert copies == (1, 2, 0)
    seen: dict[int, dict[int, list[Tensor]]] = {}

    def rank(group: ThreadGroup, redundancy: int) -> FullState:
        shares = SHARES if redundancy else tuple(own or ())
        strategy = made(name, redundancy, shares)(Net(CASE.kind, group.rank), OPTIMIZERS["adamw"], group)
        _steps(strategy, group, range(STEPS))
        if redundancy:
            seen[group.rank] = _values_by_owner(strategy)
        return strategy.full_state()  # type: ignore[no-any-return]

    for with_copy, without in zip(
        on_threads(3, lambda g: rank(g, 1)), on_threads(3, lambda g: rank(g, 0)), strict=True
    ):
        _assert_equal(with_copy, without)
    for place, owner in enumerate(copies):
        assert owner is not None
        assert set(seen[place]) == {place, owner}
        mine, theirs = seen[place][owner], seen[owner][owner]
        assert sum(value.numel() for value in theirs) > 0
        assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


class _Three(SoloGroup):
    world_size = 3


def _values_by_owner(strategy: Any) -> dict[int, list[Tensor]]:
    """Params and state of every shard that this rank holds."""
    found: dict[int, list[Tensor]] = {}
    sharded = strategy._sharded
    for shard, optimized in sharded._all_held():
        state = [value.clone() for value in sharded.inner.state[optimized].values()]
        found.setdefault(shard.rank, []).extend([optimized.detach().clone(), *state])
    return found


def _steps(strategy: Any, group: Group, numbers: range, *, parts: list[slice] | None = None) -> None:
    """Before the first step comes one that is skipped: its gradients are dropped, as those that are not finite."""
    part = (CASE.parts() if parts is None else parts)[group.rank]
    every = batches(CASE)
    for number in numbers:
        if number == 0:
            (strategy.module(*(one[part] for one in every[0][0][:2])).sum() * float("nan")).backward()
            strategy.optimizer.zero_grad()
        loss_of(strategy.module, every[number][0], part, SAMPLES).backward()
        strategy.clip(CLIP)
        strategy.optimizer.step()
        strategy.optimizer.zero_grad()


def _assert_equal(found: FullState, expected: FullState) -> None:
    assert found.model.keys() == expected.model.keys()
    torch.testing.assert_close(found.model, expected.model, rtol=0, atol=0)
    assert found.optimizer["param_groups"] == expected.optimizer["param_groups"]
    torch.testing.assert_close(found.optimizer["state"], expected.optimizer["state"], rtol=0, atol=0)


@dataclass
class Plan:
    """Where one rank is cut off: its collectives before number `cut` end as ever, of those after it there are none.

    In number `cut` all ranks take part, also the one that dies; `learns` says whether this one gets its result.
    """

    learns: bool
    cut: int = 1 << 30
    count: int = 0

    def begin(self, cut: int) -> None:
        self.cut, self.count = cut, 0


class FaultyGroup:
    """A group of threads whose collectives end as planned."""

    generation, has_cheap_host_sums = 0, False

    def __init__(self, group: Any, plan: Plan) -> None:
        self._group, self.plan = group, plan
        self.rank, self.world_size, self.traffic = group.rank, group.world_size, group.traffic

    def is_nccl(self, tensor: Tensor) -> bool:
        return False

    def new_group(self) -> "FaultyGroup":
        return FaultyGroup(self._group.new_group(), self.plan)

    def all_reduce(self, tensor: Tensor) -> Work:
        return self._start(tensor, lambda: self._group.all_reduce(tensor))

    def all_reduce_max(self, tensor: Tensor) -> Work:
        return self._start(tensor, lambda: self._group.all_reduce_max(tensor))

    def broadcast(self, tensor: Tensor, owner: int = 0) -> Work:
        return self._start(tensor, lambda: self._group.broadcast(tensor, owner))

    def _start(self, tensor: Tensor, start: Callable[[], Work]) -> Work:
        self.plan.count += 1
        is_known = self.plan.count < self.plan.cut or (self.plan.count == self.plan.cut and self.plan.learns)
        if is_known:
            return start()
        return Work(_Lost(start() if self.plan.count == self.plan.cut else None), tensor, Traffic())


@dataclass
class _Lost:
    work: Work | None

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        raise GroupLostError("rank lost")

    def is_completed(self) -> bool:
        return False


def _interrupted(name: str, learns: tuple[bool, ...], cut: int, redundancy: int = 1) -> list[Any]:
    """Every rank's strategy, after one whole step and a second one that was cut off."""

    def rank(group: ThreadGroup) -> Any:
        faulty = FaultyGroup(group, Plan(learns[group.rank]))
        strategy = made(name, redundancy)(Net(CASE.kind, group.rank), OPTIMIZERS["adamw"], faulty)
        _steps(strategy, faulty, range(1))  # type: ignore[arg-type]
        faulty.plan.begin(cut)
        try:
            _steps(strategy, faulty, range(1, 2))  # type: ignore[arg-type]
        except GroupLostError:
            return strategy, faulty.plan.count
        return strategy, faulty.plan.count

    return on_threads(3, rank)


def _survive(strategies: list[Any], old_ranks: tuple[int, ...]) -> list[Survived | None]:
    return on_threads(len(old_ranks), lambda group: strategies[old_ranks[group.rank]].surviving_state(group, old_ranks))


def _states(name: str) -> list[FullState]:
    """After 0, 1 and 2 steps that nothing interrupts, without redundancy."""
    own, _ = divide(SHARES, _Three(), 1)

    def rank(group: ThreadGroup) -> list[FullState]:
        strategy = made(name, 0, tuple(own or ()))(Net(CASE.kind, group.rank), OPTIMIZERS["adamw"], group)
        found = [strategy.full_state()]
        for number in range(2):
            _steps(strategy, group, range(number, number + 1))
            found.append(strategy.full_state())
        return found

    return on_threads(3, rank)[0]


@pytest.mark.parametrize("name", ["zero1", "zero2", "fsdp"])
def test_at_every_point_of_a_step_survivors_have_one_whole_step(name: str) -> None:
    expected = _states(name)
    (_, total), *_ = _interrupted(name, (True, True, True), 1 << 30)
    applied = set()
    for cut in range(max(1, total - 8), total + 1):  # fsdp has many more in forward, before anything is summed
        dead = cut % 3
        survivors = tuple(rank for rank in range(3) if rank != dead)
        ahead = survivors[cut // 3 % 2]  # this one learns of the last collective's end, the other one does not
        learns = tuple(rank == ahead for rank in range(3))
        strategies = [strategy for strategy, _ in _interrupted(name, learns, cut)]
        counts = [strategies[rank].updates for rank in survivors]
        for survived in _survive(strategies, survivors):
            assert survived is not None
            assert survived.updates == max(counts)
            _assert_equal(survived.state, expected[survived.updates])
        applied.add(tuple(counts))
    assert (1, 1) in applied, "before the update"
    assert applied & {(1, 2), (2, 1)}, "one was ahead"
    assert name == "fsdp" or (2, 2) in applied, "after it, while params are sent"


@pytest.mark.parametrize("name", ["zero1", "zero2", "fsdp"])
def test_who_is_left_goes_on_as_one_process_would(name: str) -> None:
    strategies = [strategy for strategy, _ in _interrupted(name, (False, True, False), 1 << 30)]
    parts = [slice(0, 7), slice(7, SAMPLES)]

    def rank(group: ThreadGroup) -> FullState:
        old = strategies[group.rank + 1]  # rank 0 is lost
        survived = old.surviving_state(group, (1, 2))
        assert survived is not None
        assert survived.updates == 2
        old.leave(survived.state)
        assert all(param.untyped_storage().nbytes() for param in old.module.parameters())
        again = made(name, 1, (1.0, 2.0))(old.module, OPTIMIZERS["adamw"], group)
        again.load_full_state(survived.state)
        _steps(again, group, range(2, STEPS), parts=parts)
        return again.full_state()  # type: ignore[no-any-return]

    for found in on_threads(2, rank):
        assert_same_state(found, train_dense(CASE).state)


def test_a_shard_is_lost_with_its_owner_and_its_keeper_or_without_copies() -> None:
    strategies = [strategy for strategy, _ in _interrupted("zero2", (True, True, True), 1 << 30)]
    assert _survive(strategies, (2,)) == [None]  # 0 keeps 1's shard
    alone = [strategy for strategy, _ in _interrupted("zero2", (True, True, True), 1 << 30, redundancy=0)]
    assert _survive(alone, (0, 2)) == [None, None]
    assert None not in _survive(alone, (0, 1, 2)), "nobody is lost"


def test_whole_tensors_are_kept_too() -> None:
    """Of an optimizer that needs them: here every tensor has an owner and a keeper."""

    def train(group: Any, *, copies: bool) -> tuple[Any, FullState]:
        own, ring = divide(SHARES, _Three(), 1)
        model = Net("plain", group.rank)
        strategy = Zero1(
            model,
            lambda p: Adafactor(p, lr=1e-2),
            group,
            shares=own,
            options=FitOptions(copies=ring if copies else None),
        )
        _steps(strategy, group, range(2))
        return strategy, strategy.full_state()

    (_, expected), *_ = on_threads(3, lambda group: train(group, copies=False))
    strategies = [strategy for strategy, _ in on_threads(3, lambda group: train(group, copies=True))]
    for survived in _survive(strategies, (0, 2)):
        assert survived is not None
        _assert_equal(survived.state, expected)


def test_a_rank_holds_what_it_owns_and_what_it_keeps() -> None:
    def rank(group: ThreadGroup) -> int:
        strategy = made("fsdp", 1, (4.0, 4.0, 1.0, 1.0))(nn.Linear(100, 21), OPTIMIZERS["adamw"], group)
        strategy.module(torch.ones(1, 100)).sum().backward()
        strategy.optimizer.step()
        shards = [s for unit in strategy._units for s in unit.flat_shards]
        params = sum(value.numel() for one in shards for value in one.held.values())
        state = sum(v.numel() for s in strategy.optimizer.inner.state.values() for v in s.values() if v.dim())
        assert state == 2 * params
        return params

    held = on_threads(4, rank)
    torch.testing.assert_close(torch.tensor(held) / 2121, torch.tensor([0.8, 0.8, 0.2, 0.2]), rtol=0, atol=2e-3)
