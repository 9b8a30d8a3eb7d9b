"""Memory caps found on devices that exist only on paper, and on a real one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from uneven.step.measure import find_cap, probe_cap


class Paper:
    """A device whose steps take fixed bytes, so many per sample, and a bit more that depends on the size."""

    def __init__(self, memory: int, fixed: int, per_sample: int, workspace: dict[int, int] | None = None) -> None:
        self.memory, self.fixed, self.per_sample, self.workspace = memory, fixed, per_sample, workspace or {}
        self.tried: list[int] = []
        self.fell = 0
        self._peak = 0

    def run(self, samples: int) -> None:
        self.tried.append(samples)
        self._peak = self.needs(samples)
        if self._peak > self.memory:
            self.fell += 1
            raise torch.OutOfMemoryError("out of paper")

    def needs(self, samples: int) -> int:
        return self.fixed + self.per_sample * samples + self.workspace.get(samples, 0)

    def cap(self, limit: float, first: int, most: int) -> int:
        return find_cap(self.run, lambda: self._peak, limit, first, most)


@given(
    memory=st.integers(100, 10_000),
    fixed=st.integers(0, 2000),
    per_sample=st.integers(1, 200),
    first=st.integers(1, 64),
    times=st.integers(1, 16),
)
def test_the_cap_fits_and_not_much_more_would(memory: int, fixed: int, per_sample: int, first: int, times: int) -> None:
    device, most = Paper(memory, fixed, per_sample), first * times
    cap = device.cap(0.9 * memory, first, most)
    assert 1 <= cap <= most
    room = min(most, int((0.9 * memory - fixed) / per_sample))
    if room < 1:
        assert cap == 1
        return
    assert device.needs(cap) <= 0.9 * memory
    assert cap in device.tried
    assert cap >= 4 * room // 5 - 1
    assert len(device.tried) <= 16
    assert len(set(device.tried)) == len(device.tried)


@given(st.integers(1, 64), st.integers(1, 100), st.integers(0, 1000))
def test_a_size_that_cannot_fit_is_not_tried(first: int, per_sample: int, fixed: int) -> None:
    """Two sizes fit; by their line the next doubling does not."""
    memory = int((fixed + 3 * first * per_sample) / 0.9)
    device = Paper(memory, fixed, per_sample)
    assert device.cap(0.9 * memory, first, 64 * first) <= 3 * first
    assert device.fell == 0
    assert all(device.needs(samples) <= 0.9 * memory + per_sample for samples in device.tried)


def test_the_whole_slot_is_the_most() -> None:
    device = Paper(10**9, 0, 1)
    assert device.cap(9e8, 8, 100) == 100
    assert device.tried == [8, 16, 32, 64, 100]


def test_a_last_bit_up_to_the_whole_slot_is_tried() -> None:
    device = Paper(10**9, 0, 1)
    assert device.cap(9e8, 60, 62) == 62


def test_a_size_that_takes_more_than_predicted_leads_back_by_halves() -> None:
    device = Paper(1000, 0, 10, workspace=dict.fromkeys(range(61, 100), 500))
    assert 54 <= device.cap(900, 8, 1000) <= 60
    assert device.fell == 1


def test_a_first_size_that_does_not_fit_is_halved() -> None:
    device = Paper(1000, 0, 100)
    assert device.cap(900, 64, 128) in (8, 9)
    assert device.tried[0] == 64


def test_other_errors_are_not_taken_for_a_full_memory() -> None:
    def broken(samples: int) -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        find_cap(broken, lambda: 0, 1.0, 1, 2)


@pytest.mark.cuda
def test_a_real_device_is_probed_and_given_back() -> None:
    device = torch.device("cuda", 0)
    held = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    base = torch.cuda.memory_allocated(device)

    def run(samples: int) -> None:
        torch.empty(samples << 20, dtype=torch.uint8, device=device)

    cap = probe_cap(run, device, base + (100 << 20), 8, 1000)
    assert 88 <= cap <= 100
    assert torch.cuda.max_memory_allocated(device) <= base
    del held
