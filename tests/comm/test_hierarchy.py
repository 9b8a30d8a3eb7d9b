"""The group over several machines: ranks 1 and 2 are on one machine, 0 and 3 on machines of their own.

The ranks are threads with real transports, where nothing is said; what happens between processes is at the end.
"""

import random
import signal
import subprocess
import sys
import threading
import zlib
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.comm.machine_ranks import on_machines
from tests.comm.shared_ranks import SMALL
from tests.forked import ForkedPopen
from uneven.comm import form, segment
from uneven.comm.hierarchy import HierarchicalGroup
from uneven.comm.store import open_store
from uneven.comm.torch_group import GlooGroup
from uneven.comm.work import Traffic, Work

MACHINES = (0, 1, 1, 2)
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)
SIZES = (0, 1, 7, 30_000)
KINDS = ("sum", "max", "broadcast", "reduce")


def values(rank: int, dtype: torch.dtype, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + size)
    if dtype.is_floating_point:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 50, (size,), generator=generator).to(dtype)


def start(group: HierarchicalGroup, kind: str, tensor: Tensor, owner: int) -> Work:
    if kind == "sum":
        return group.all_reduce(tensor)
    if kind == "max":
        return group.all_reduce_max(tensor)
    return group.broadcast(tensor, owner) if kind == "broadcast" else group.reduce(tensor, owner)


def expected(kind: str, machines: tuple[int, ...], dtype: torch.dtype, size: int, owner: int) -> Tensor:
    """A machine's values are added in rank order; a sum over machines is compared with tolerance."""
    parts = [values(rank, dtype, size) for rank in range(len(machines))]
    if kind == "broadcast":
        return parts[owner]
    if kind == "max":
        return torch.stack(parts).amax(0)
    sums: dict[int, Tensor] = {}
    for machine, part in zip(machines, parts, strict=True):
        sums[machine] = sums[machine] + part if machine in sums else part
    total = torch.zeros(size, dtype=dtype)
    for part in sums.values():
        total += part
    return total


def checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())


CASES = [*product(KINDS, TYPES, SIZES, range(4))]


def run_all(group: HierarchicalGroup, cases: list[Any], most: int) -> list[Tensor]:
    """All collectives, up to `most` outstanding at a time; a third of them is asked for before they are waited for."""
    works: list[Work] = []
    for number, (kind, dtype, size, owner) in enumerate(cases):
        works.append(start(group, kind, values(group.rank, dtype, size), owner))
        if number >= most:
            works[number - most].wait()
        if number % 3 == 0:
            works[-1].is_completed()
    return [work.wait() for work in works]


@pytest.mark.parametrize("machines", [MACHINES, (0, 1, 0, 1), (0, 0, 0, 1)])
def test_all_ranks_get_the_same_bits_of_every_collective(machines: tuple[int, ...]) -> None:
    cases = random.Random(str(machines)).sample(CASES, 70 if machines == MACHINES else 30)
    found = on_machines(machines, lambda group: run_all(group, cases, 12))
    for number, (kind, dtype, size, owner) in enumerate(cases):
        right = expected(kind, machines, dtype, size, owner)
        tolerance = {"rtol": 0.05, "atol": 0.1} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(found[owner][number], right, **tolerance)
        if kind != "reduce":
            assert {checksum(one[number]) for one in found} == {checksum(found[owner][number])}, cases[number]


def test_sums_are_the_same_in_every_run() -> None:
    """Over three machines the order of a sum matters; in bf16 nearly every element would tell."""

    def rank(group: HierarchicalGroup) -> list[int]:
        works = [group.all_reduce(values(group.rank, torch.bfloat16, 1000 + number)) for number in range(6)]
        return [checksum(work.wait()) for work in works]

    first, second = on_machines(MACHINES, rank), on_machines(MACHINES, rank)
    assert first == second
    assert first[1:] == first[:-1]


def test_a_machines_ranks_are_summed_in_rank_order_before_the_network() -> None:
    parts = torch.tensor([0.0, 1e8, 1.0, -1e8], dtype=torch.float32)

    def rank(group: HierarchicalGroup) -> float:
        return group.all_reduce(parts[group.rank].clone()).wait().item()

    assert ((parts[1] + parts[2]) + (parts[0] + parts[3])).item() == 0.0
    assert on_machines((0, 1, 1, 0), rank) == [0.0] * 4
    assert ((parts[2] + parts[3]) + (parts[0] + parts[1])).item() == 0.0
    assert on_machines((0, 1, 1, 2), rank)[1:] == on_machines((0, 1, 1, 2), rank)[:-1]


@pytest.mark.parametrize("machines", [(0, 0, 1, 1), MACHINES])
def test_ranks_wait_for_two_groups_in_different_orders(machines: tuple[int, ...]) -> None:
    """All tensors are larger than a ring, so that no stage is over when it has begun: who waits in one group must go on
    in the other."""

    def rank(group: HierarchicalGroup) -> list[float]:
        twin = group.new_group()
        tensors = [torch.full((100_000,), 10.0 * number + group.rank) for number in range(4)]
        works = [twin.all_reduce(tensors[0]), group.all_reduce(tensors[1])]
        works += [group.broadcast(tensors[2], 2), twin.all_reduce_max(tensors[3])]
        for number in (0, 3, 2, 1) if machines[group.rank] else (2, 1, 0, 3):
            works[number].wait()
        assert twin.traffic.collectives == group.traffic.collectives == 2
        return [tensor.mean().item() for tensor in tensors]

    assert on_machines(machines, rank, SMALL) == [[6.0, 46.0, 22.0, 33.0]] * 4


def test_a_speaker_that_sleeps_in_one_group_brings_the_network_of_the_other_to_its_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 2 begins a sum of the first group when it has that of the second, which rank 0 joins last."""
    asleep = threading.Event()

    def rank(group: HierarchicalGroup) -> list[float]:
        twin, own, other = group.new_group(), torch.ones(2), torch.ones(2)
        if group.rank == 1:
            peers = group._up._exchange._peers  # type: ignore[union-attr]
            meanwhile = peers._meanwhile
            monkeypatch.setattr(peers, "_meanwhile", lambda: (asleep.set(), meanwhile()))
            works = [twin.all_reduce(other), group.all_reduce(own)]
            works[1].wait()
            works[0].wait()
        else:
            assert group.rank == 2 or asleep.wait(100)
            twin.all_reduce(other).wait()
            group.all_reduce(own).wait()
        return [*own.tolist(), *other.tolist()]

    assert on_machines((0, 1, 1), rank) == [[3.0] * 4] * 3


def test_a_tensor_with_gaps_is_summed_in_place() -> None:
    def rank(group: HierarchicalGroup) -> list[float]:
        whole = torch.full((4, 3), float(group.rank))
        group.all_reduce(whole[:, 1]).wait()
        return whole[0].tolist()

    assert on_machines(MACHINES, rank) == [[float(rank), 6.0, float(rank)] for rank in range(4)]


def test_bytes_on_the_network_do_not_grow_with_the_ranks_of_a_machine() -> None:
    def rank(group: HierarchicalGroup) -> tuple[Traffic, Traffic]:
        for dtype in (torch.float32, torch.float64):
            group.all_reduce(torch.ones(1000, dtype=dtype)).wait()
        group.all_reduce_max(torch.ones(10)).wait()
        group.broadcast(torch.ones(10), 1).wait()
        group.reduce(torch.ones(10), 2).wait()
        return group.traffic, Traffic() if group.network is None else group.network.traffic

    few = on_machines((0, 1, 1), rank, after_end=False)
    many = on_machines((0, 0, 1, 1, 1), rank, after_end=False)
    for found, speakers in ((few, (0, 1)), (many, (0, 2))):
        for place, (own, network) in enumerate(found):
            assert (own.collectives, own.payload_bytes) == (5, 4000 + 8000 + 3 * 40)
            assert network.collectives == (5 if place in speakers else 0)
            assert network.payload_bytes == (own.payload_bytes if place in speakers else 0)


def test_claims_of_all_ranks_come_from_one_count() -> None:
    claims = on_machines(MACHINES, lambda group: [group.claim(2), group.new_group().claim(1)])
    taken = [first + more for first, second in claims for more in (0, 1)] + [second for _, second in claims]
    assert sorted(taken) == list(range(12))


def test_where_memory_cannot_be_shared_ranks_of_a_machine_take_gloo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(segment, "why_impossible", lambda: "not here")
    cases = random.Random(1).sample(CASES, 25)
    kinds: list[type] = []

    def rank(group: HierarchicalGroup) -> list[Tensor]:
        kinds.append(type(group._up))
        return run_all(group.new_group(), cases, 5)

    found = on_machines(MACHINES, rank)
    assert kinds.count(GlooGroup) == 2
    for number, (kind, dtype, size, owner) in enumerate(cases):
        right = expected(kind, MACHINES, dtype, size, owner)
        tolerance = {"rtol": 0.05, "atol": 0.1} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(found[owner][number], right, **tolerance)
        if kind != "reduce":
            assert {checksum(one[number]) for one in found} == {checksum(found[owner][number])}, cases[number]
    said = capsys.readouterr().err
    assert said == "uneven: ranks 1, 2 communicate over Gloo, shared memory is not possible: not here\n"


@pytest.mark.parametrize("leaver", [2, 3])
def test_when_a_rank_leaves_all_others_fail_and_none_waits_for_ever(leaver: int) -> None:
    """Rank 2 is missed by its speaker first, rank 3 over the network; from there the loss goes round."""

    def rank(group: HierarchicalGroup) -> str:
        twin = group.new_group()
        group.all_reduce(torch.ones(3)).wait()
        if group.rank == leaver:
            return "left"
        work = twin.all_reduce(torch.ones(5))
        with pytest.raises(RuntimeError) as raised:
            work.wait()
        assert work.is_completed()
        with pytest.raises(RuntimeError):
            twin.all_reduce(torch.ones(1)).wait()
        return str(raised.value)

    said = on_machines(MACHINES, rank, after_end=False)
    if leaver == 2:
        assert said[1] == "rank 2 has left: connection closed by peer (shared memory)"
    else:
        assert said[2] == "rank 1 has left: connection closed by peer (shared memory)"
    for other in {0, 1, 3} - {leaver} - ({1} if leaver == 2 else set()):
        assert "onnection closed by peer" in said[other]


@pytest.mark.parametrize(
    ("backend", "machines", "formed"),
    [
        ("cpu", (0, 1, 1), "over machines"),
        ("cpu", (0, 1, 2), "gloo"),
        ("cpu", (0, 0, 0), "shared"),
        ("cpu", None, "shared"),
        ("shm", (0, 0, 0), "shared"),
        ("gloo", (0, 1, 1), "gloo"),
    ],
)
def test_which_group_is_formed(
    monkeypatch: pytest.MonkeyPatch, backend: str, machines: tuple[int, ...] | None, formed: str
) -> None:
    for name, kind in (("TorchGroup", "gloo"), ("share", "shared"), ("join_machines", "over machines")):
        monkeypatch.setattr(form, name, lambda *_, kind=kind, **__: kind)
    store: Any = None
    assert form.form_group(store, 0, 3, torch.device("cpu"), backend, False, machines=machines) == formed


@pytest.mark.cuda
def test_cuda_tensors_of_a_stream_get_the_bits_of_host_tensors() -> None:
    """What follows in the stream sees the result, and what comes before it in the stream is in the sum."""
    cases = [case for case in random.Random(2).sample(CASES, 200) if case[0] != "reduce"]

    def rank(group: HierarchicalGroup, device: str) -> list[int]:
        found: list[Tensor] = []
        with torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext():
            for kind, dtype, size, owner in cases:
                tensor = torch.zeros(size, dtype=dtype, device=device)
                tensor += values(group.rank, dtype, size).to(device, non_blocking=True)
                found.append(start(group, kind, tensor, owner).wait() + 1)
            return [checksum(one.cpu()) for one in found]

    on_host = on_machines(MACHINES, lambda group: rank(group, "cpu"))
    assert on_machines(MACHINES, lambda group: rank(group, "cuda"), device="cuda") == on_host


# Between processes.

RANK = """
import os, signal, sys
import torch
import torch.distributed as dist
from uneven.comm.form import form_group
from uneven.comm.gather import gather_checksums
from uneven.comm.store import reach_store

rank, store = int(sys.argv[2]), reach_store("127.0.0.1", int(sys.argv[1]))
torch.set_num_threads(1)
group = form_group(store, rank, 4, torch.device("cpu"), "cpu", False, machines=(0, 1, 1, 2))
total = group.all_reduce(torch.randn(1000, generator=torch.Generator().manual_seed(rank))).wait()
everyone = torch.tensor([1.0])
dist.all_reduce(everyone)  # torch's default group is that of all ranks
print(type(group).__name__, group.backend, everyone.item(), len(set(gather_checksums(group, [total]))), flush=True)
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    group.all_reduce(torch.ones(5)).wait()
except RuntimeError as error:
    print(error, flush=True)
group.close()
os._exit(0)
"""


def test_processes_get_the_same_bits_and_all_fail_when_one_is_killed() -> None:
    store, port = open_store()
    command = [sys.executable, "-c", RANK, str(port)]
    ranks = [ForkedPopen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(4)]
    said = [rank.communicate(timeout=100)[0].splitlines() for rank in ranks]
    del store
    assert [rank.returncode for rank in ranks] == [0, 0, -signal.SIGKILL, 0]
    assert [lines[0] for lines in said] == ["HierarchicalGroup cpu 4.0 1"] * 4
    assert said[1][1] == "rank 2 has left: connection closed by peer (shared memory)"
    assert all("onnection closed by peer" in said[rank][1] for rank in (0, 3))
