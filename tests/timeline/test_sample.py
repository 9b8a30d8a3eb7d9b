import sys
import threading
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest

from uneven.timeline import sample as module
from uneven.timeline.sample import Sample, Sampler


class OneGpu(ModuleType):
    """An NVML with one GPU that answers and one that is lost."""

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None: ...  # noqa: N802

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:  # noqa: N802
        if handle == 1:
            raise self.NVMLError
        return SimpleNamespace(gpu=73)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(used=1234 + handle)


def wait_for_samples(sampler: Sampler, count: int) -> None:
    sampler.start()
    ticker = threading.Event()
    for _ in range(20_000):
        if len(sampler.samples) >= count:
            break
        ticker.wait(0.005)
    sampler.stop()
    assert len(sampler.samples) >= count


def test_samples_carry_cpu_and_memory_and_end_with_stop() -> None:
    sampler = Sampler(interval_s=0.001)
    wait_for_samples(sampler, 3)
    assert all(sample.process_bytes > 0 and sample.ram_bytes > 0 for sample in sampler.samples)
    times = [sample.t_ns for sample in sampler.samples]
    assert times == sorted(times)
    assert not any(thread.name == "uneven-sampler" for thread in threading.enumerate())


def test_a_lost_gpu_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", OneGpu("pynvml"))
    sampler = Sampler(interval_s=0.001)
    wait_for_samples(sampler, 1)
    assert sampler.samples[0].gpus == ((0, 73.0, 1234),)


def test_the_process_is_measured_since_the_last_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Sampler()
    moments = iter([(10.0, 4.0), (10.5, 4.75), (12.5, 4.75)])  # (clock, CPU seconds)
    for expected in (None, 150.0, 0.0):
        now, worked = next(moments)
        clock = SimpleNamespace(
            perf_counter=lambda now=now: now, process_time=lambda worked=worked: worked, perf_counter_ns=lambda: 0
        )
        monkeypatch.setattr(module, "time", clock)
        measured = sampler._take_sample()
        assert expected is None or measured.process_cpu == expected


def test_a_long_run_has_a_bounded_number_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten a second, for as long as the run took: 1.5 GB in a week."""
    monkeypatch.setattr(module, "MOST", 8)
    sampler = Sampler(interval_s=0.1)
    now_s = 0.0
    while now_s < 100.0:
        sampler._record(Sample(int(1e9 * now_s), 0.0, 0.0, 0, 0, ()))
        now_s += sampler._interval_s
    kept_s = [sample.t_ns / 1e9 for sample in sampler.samples]
    assert 4 <= len(kept_s) < 8
    gaps = [after - before for before, after in pairwise([0.0, *kept_s, 100.0])]
    assert max(gaps) <= 2.1 * sampler._interval_s, "evenly, of the whole run"
