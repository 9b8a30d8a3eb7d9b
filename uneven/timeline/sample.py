"""The sampler: a background thread that records the utilisation of the CPU, the memory and each GPU every 100 ms.

The worker starts it. It reads psutil and NVML and never touches torch, so it cannot disturb the CUDA streams that it
observes. Without NVML the samples have no GPUs. Every file that psutil reads releases and reacquires the GIL, which
slows training more than the read itself. So the CPU time of the process comes from a clock, not from a file, and the
memory of the machine is read only once a second. A long run has no more than MOST samples: each time it has, every
second one is dropped, and they are taken half as often.
"""

import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

MOST = 8192  # 2 MB; 14 minutes at 100 ms. All of a week's would be 1.5 GB


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement: percentages from 0 to 100 (process_cpu: 100 per core), and bytes for memory."""

    t_ns: int
    cpu: float
    process_cpu: float
    ram_bytes: int
    process_bytes: int
    gpus: tuple[tuple[int, float, int], ...]  # (index, utilisation, memory used)
    machine: int = 0

    def fields(self) -> dict[str, Any]:
        """All fields but the time, as in the JSON."""
        return {name: value for name, value in asdict(self).items() if name != "t_ns"}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "Sample":
        own = {name: value for name, value in record.items() if name not in ("t", "gpus")}
        return cls(t_ns=record["t"], gpus=tuple(map(tuple, record["gpus"])), **own)


class Sampler:
    """Samples from `start()` to `stop()`; `samples` may be read at any time."""

    def __init__(self, interval_s: float = 0.1) -> None:
        import psutil

        self.samples: list[Sample] = []
        self._interval_s = interval_s
        self._psutil = psutil
        self._process = psutil.Process()
        self._gpus = _open_gpus()
        self._ram_bytes = 0  # used memory of the machine, read once a second
        self._last_times = (0.0, 0.0)  # of the last sample: (clock, CPU seconds of this process)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="uneven-sampler", daemon=True)

    def start(self) -> None:
        self._psutil.cpu_percent()  # it measures since the previous call, so the first result is meaningless
        self._last_times = (time.perf_counter(), time.process_time())
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(self._interval_s):
            self._record(self._take_sample())

    def _record(self, sample: Sample) -> None:
        self.samples.append(sample)
        if len(self.samples) >= MOST:
            self.samples = self.samples[1::2]
            self._interval_s *= 2.0

    def _take_sample(self) -> Sample:
        gpus = []
        for index, handle in self._gpus:
            import pynvml

            try:
                rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            except pynvml.NVMLError:
                continue  # a GPU may be lost or refuse (MIG); the rest of the sample is valid
            gpus.append((index, float(rates.gpu), int(memory.used)))
        if len(self.samples) % max(1, round(1 / self._interval_s)) == 0:
            self._ram_bytes = self._psutil.virtual_memory().used
        previous, self._last_times = self._last_times, (time.perf_counter(), time.process_time())
        seconds, cpu_seconds = (now - then for now, then in zip(self._last_times, previous, strict=True))
        return Sample(
            t_ns=time.perf_counter_ns(),
            cpu=self._psutil.cpu_percent(),
            process_cpu=round(100 * cpu_seconds / seconds, 1),
            ram_bytes=self._ram_bytes,
            process_bytes=self._process.memory_info().rss,
            gpus=tuple(gpus),
        )


def _open_gpus() -> list[tuple[int, Any]]:
    try:
        import pynvml

        pynvml.nvmlInit()
        return [(i, pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # no package, no driver or no permission: samples without GPUs
        return []
