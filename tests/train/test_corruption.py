"""A flipped bit, with `verify`: the rank that is wrong is named and ends, the others go on from what they agreed upon.

On threads, with real workers; the params count what was trained, see test_settle_local.py.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.train.clusters import Leader, Loss
from tests.train.elastic.lossy_local_runs import check, train, undisturbed
from uneven.average.background import BackgroundAverage
from uneven.errors import RankError
from uneven.train import settle
from uneven.train.local_sgd import LocalSGD

pytestmark = pytest.mark.usefixtures("equal_speeds")


def flip_a_bit(numbers: Tensor) -> None:
    with torch.no_grad():
        numbers[3:4].view(torch.int64).bitwise_xor_(1)


def flip(monkeypatch: pytest.MonkeyPatch, stage: str, victim: str, at: int = 2) -> None:
    """A bit of one rank in round `at` of generation 0: in its average after the sum, or in its snapshot."""
    rounds = dict.fromkeys(("_compare_averages", "_all_reduce_rows"), 0)

    def is_now(average: BackgroundAverage, name: str) -> bool:
        group: Any = average._group
        if (group.member, group.generation) != (victim, 0):
            return False
        rounds[name] += 1
        return rounds[name] == at

    compare, send_rows = BackgroundAverage._compare_averages, BackgroundAverage._all_reduce_rows

    def compared(self: BackgroundAverage, average: Tensor, is_suspect: bool) -> None:
        if is_now(self, "_compare_averages") and stage == "average":
            flip_a_bit(average)
        compare(self, average, is_suspect)

    def rows_sent(self: BackgroundAverage, *arguments: Any) -> None:
        send_rows(self, *arguments)
        if is_now(self, "_all_reduce_rows"):
            if stage == "snapshot":
                flip_a_bit(self.transport.snapshot.buffer)
            if stage == "sent snapshot":
                self._group = _FlipsInSum(self._group, self.transport.snapshot.buffer)  # type: ignore[assignment]

    monkeypatch.setattr(BackgroundAverage, "_compare_averages", compared)
    monkeypatch.setattr(BackgroundAverage, "_all_reduce_rows", rows_sent)


class _FlipsInSum:
    """Its next sum changes a bit of something else."""

    def __init__(self, inner: Any, numbers: Tensor) -> None:
        self._inner, self._numbers, self._is_done = inner, numbers, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def all_reduce(self, tensor: Tensor) -> Any:
        if not self._is_done:
            self._is_done = True
            flip_a_bit(self._numbers)
        return self._inner.all_reduce(tensor)


@pytest.mark.parametrize("policy", ["cadence", "async"])
@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("average", "verify: rank 1 has another average than rank 0"),
        ("snapshot", "verify: rank 1: the snapshot changed between its taking and its sending"),
        ("sent snapshot", "verify: rank 1: the snapshot changed between its sending and its merge"),
    ],
)
def test_a_rank_with_a_flipped_bit_ends_and_its_work_is_trained_again(
    monkeypatch: pytest.MonkeyPatch, policy: str, stage: str, words: str
) -> None:
    flip(monkeypatch, stage, "m1")
    found, leader = train(3, [], policy=policy, verify=True, failing=["m1"], is_evaluated=True, epochs=2)
    check(found, epochs=2, is_evaluated=True)
    assert set(found) == {"m0", "m2"}
    assert len(leader.generations) == 2
    error = leader.failures["m1"]
    assert type(error) is RankError
    assert str(error) == words
    if stage != "snapshot" and policy == "cadence":  # else only the rank itself may know, and the others miss it
        assert set(leader.causes) == {words}


def test_of_two_ranks_the_one_whose_snapshot_changed_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    flip(monkeypatch, "sent snapshot", "m0")
    found, leader = train(2, [], policy="async", verify=True, failing=["m0"], epochs=1)
    check(found, epochs=1)
    assert set(found) == {"m1"}
    assert "rank 0: the snapshot changed" in str(leader.failures["m0"])


def test_where_two_averages_differ_nobody_can_be_blamed_and_the_round_is_done_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flip(monkeypatch, "average", "m1")
    repeat_when_asked(monkeypatch)
    found, leader = train(2, [], policy="cadence", verify=True, epochs=1)
    check(found, epochs=1)
    assert set(found) == {"m0", "m1"}
    assert len(leader.generations) == 2
    words = "verify: rank 1 has another average than rank 0, and no majority says which of them is right"
    assert leader.causes == [words] * 2


def repeat_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the launcher does where all members live and one has lost its group."""
    wait_after = Leader.wait_after

    def repeated(self: Leader, number: int) -> Any:
        with self._changed:
            if self.newest.number == number and len(self.causes) == len(self.newest.members):
                self._announce(self.newest.members, "again")
                self._changed.notify_all()
        return wait_after(self, number)

    monkeypatch.setattr(Leader, "wait_after", repeated)


def test_a_rank_that_differs_at_the_end_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    finalize = LocalSGD.finalize

    def finalized(self: LocalSGD) -> None:
        if self.engine.rank_info.member == "m2":
            flip_a_bit(next(self.engine.model.parameters()))
        finalize(self)

    monkeypatch.setattr(LocalSGD, "finalize", finalized)
    found, leader = train(3, [], policy="cadence", verify=True, failing=["m2"], epochs=1)
    check(found, epochs=1)
    assert set(found) == {"m0", "m1"}
    assert str(leader.failures["m2"]) == "verify: rank 2 differs from rank 0 in its params or buffers at the end"


def test_an_average_that_changes_on_its_way_to_a_rank_that_is_behind_is_not_merged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """m1 dies with the sum that commits a round, which m2 does not get; m2 is sent the average with a flipped bit."""
    gather = settle.gather_checksums

    def gathered(group: Any, tensors: list[Tensor]) -> list[int]:
        if (group.member, group.generation) == ("m2", 1):
            flip_a_bit(tensors[0])
        return gather(group, tensors)

    begun, _ = undisturbed(4, "async", 1, is_evaluated=False)
    monkeypatch.setattr(settle, "gather_checksums", gathered)
    loss = Loss("m1", begun + 2, after=True, blind=frozenset({"m2"}))
    found, leader = train(4, [loss], policy="async", verify=True, failing=["m2"], epochs=1)
    check(found, epochs=1)
    assert set(found) == {"m0", "m3"}
    assert str(leader.failures["m2"]) == "verify: rank 1 has another average than rank 0"
