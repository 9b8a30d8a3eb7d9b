"""Random set-ups train what one process trains, and no rank waits for ever; many of them with `-m soak`."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel.random_setups import Setup, check, check_all, wrapped
from tests.ranks import ThreadGroup, on_processes, on_threads
from uneven.comm.group import Group
from uneven.comm.work import Work

THREADS, FEW, MANY = 12, 10, 50
# No rank has samples in every step, and one takes part in two micro-batches alone.
SAMPLES = (((3, 0, 4), (0, 0, 2)), ((0, 5, 0), (1, 1, 1)), ((2, 2, 0), (0, 3, 3)))


@pytest.mark.parametrize("bucket_mb", [0, None])
@pytest.mark.parametrize(("kind", "segment"), [("plain", 0), ("gated", -3), ("gated", 4), ("branches", 0)])
def test_all_ranks_start_all_collectives_of_fsdp_in_one_order(
    kind: str, segment: int, bucket_mb: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """See [Note: order of a step]: also those without samples, those that use fewer params, and those whose gradients
    come late.
    """
    started: list[list[tuple[int, int]]] = [[], [], []]
    meet = ThreadGroup._meet

    def noted(group: ThreadGroup, tensor: Tensor, *rest: Any) -> Work:
        started[group.rank].append((id(group._room), tensor.numel()))
        return meet(group, tensor, *rest)

    monkeypatch.setattr(ThreadGroup, "_meet", noted)
    setup = Setup("fsdp", 3, 9, 5, kind, segment, bucket_mb, (1.0, 0.0, 2.0), "adamw", SAMPLES)
    on_threads(3, partial(check, setup))
    assert started[0] == started[1] == started[2]


def test_what_comes_too_late_once_is_in_time_from_then_on() -> None:
    """A checkpoint over several units needs all of them before the first gradient: its first backward sums twice."""

    def counts(group: ThreadGroup) -> list[int]:
        strategy = wrapped(Setup("fsdp", 2, 8, 3, "plain", 4, None, (1.0, 1.0), "sgd", ()), group)
        found = []
        for _ in range(3):
            before = group.traffic.collectives
            if group.rank:
                strategy.backward_without_samples()
            else:
                strategy.module(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
            found.append(group.traffic.collectives - before)
        return found

    first, second, third = on_threads(2, counts)[0]
    assert first > second == third


@pytest.mark.parametrize("seed", range(THREADS))
def test_a_random_setup_trains_what_one_process_does(seed: int) -> None:
    ranks = 2 + seed % 3
    on_threads(ranks, partial(check, Setup.drawn(seed, ranks)))


def few(group: Group) -> list[str]:
    return check_all(group, range(1000, 1000 + FEW))


def many(group: Group) -> list[str]:
    first = 2000 + MANY * (2 * group.world_size + (group.backend == "gloo"))  # type: ignore[attr-defined]
    return check_all(group, range(first, first + MANY))


@pytest.mark.parametrize(
    ("ranks", "backend", "what"),
    [
        (3, "cpu", "few"),
        *(
            pytest.param(ranks, backend, "many", marks=pytest.mark.soak)
            for ranks in (2, 3, 4)
            for backend in ("cpu", "gloo")
        ),
    ],
)
def test_random_setups_over_a_real_wire(ranks: int, backend: str, what: str, tmp_path: Path) -> None:
    """The soak has 300: 50 for each number of ranks, through shared memory and over Gloo."""
    for failed in on_processes(ranks, f"{__name__}:{what}", tmp_path, backend):
        assert not failed, "\n".join(failed)
