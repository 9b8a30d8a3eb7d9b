"""The sampler: a background thread that notes utilisation every 100 ms, of the CPU, the memory and each GPU.

It reads psutil and NVML and never touches torch, so it cannot disturb the streams it observes. Without NVML
the GPU columns are simply absent. Every file it reads hands Python's lock to and fro, which the training feels more
than the reading: so the process's own time is asked of the clock, and the machine's memory once a second.
"""

import threading
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Sample:
    """One look: percentages from 0 to 100 (process_cpu: 100 per core), bytes for memory."""

    t_ns: int
    cpu: float
    process_cpu: float
    ram_bytes: int
    process_bytes: int
    gpus: tuple[tuple[int, float, int], ...]  # (index, utilisation, memory used)

    def fields(self) -> dict[str, Any]:
        """All but the time, as JSON has it."""
        return {
            "cpu": self.cpu,
            "process_cpu": self.process_cpu,
            "ram_bytes": self.ram_bytes,
            "process_bytes": self.process_bytes,
            "gpus": [list(gpu) for gpu in self.gpus],
        }


class Sampler:
    """Samples from `start()` to `stop()`; `samples` may be read at any time."""

    def __init__(self, interval_s: float = 0.1) -> None:
        import psutil

        self.samples: list[Sample] = []
        self._interval_s = interval_s
        self._psutil = psutil
        self._process = psutil.Process()
        self._gpus = _open_gpus()
        self._ram_bytes = 0  # of the machine, as of the last full second
        self._before = (0.0, 0.0)  # the last look's (moment, seconds that this process had worked)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._work, name="uneven-sampler", daemon=True)

    def start(self) -> None:
        self._psutil.cpu_percent()  # a percentage is since the previous call: the first one has no previous
        self._before = (time.perf_counter(), time.process_time())
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()

    def _work(self) -> None:
        while not self._done.wait(self._interval_s):
            self.samples.append(self._look())

    def _look(self) -> Sample:
        gpus = []
        for index, handle in self._gpus:
            import pynvml

            try:
                rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            except pynvml.NVMLError:
                continue  # a GPU may fall off or refuse (MIG): the rest of the sample stands
            gpus.append((index, float(rates.gpu), int(memory.used)))
        if len(self.samples) % max(1, round(1 / self._interval_s)) == 0:
            self._ram_bytes = self._psutil.virtual_memory().used
        before, self._before = self._before, (time.perf_counter(), time.process_time())
        seconds, worked = (now - then for now, then in zip(self._before, before, strict=True))
        return Sample(
            t_ns=time.perf_counter_ns(),
            cpu=self._psutil.cpu_percent(),
            process_cpu=round(100 * worked / seconds, 1),
            ram_bytes=self._ram_bytes,
            process_bytes=self._process.memory_info().rss,
            gpus=tuple(gpus),
        )


def _open_gpus() -> list[tuple[int, Any]]:
    try:
        import pynvml

        pynvml.nvmlInit()
        return [(i, pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # no package, no driver, no permission: all mean "no GPU columns"
        return []
