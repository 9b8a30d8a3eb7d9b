"""Whether an installed torch trains: one step on every device, each in a process that may die of it."""

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from uneven.install import training_step

TIMEOUT_S = 300.0  # the first start of a CUDA build from a slow disk takes minutes


@dataclass(frozen=True)
class Checked:
    """The result of the training step on one device."""

    device: str
    ok: bool
    name: str = ""
    loss: float | None = None
    error: str | None = None

    def __str__(self) -> str:
        name = f" ({self.name})" if self.name else ""
        return f"{self.device}{name}: " + (f"ok, loss {self.loss:.3f}" if self.ok else f"FAILED: {self.error}")


def check_devices(python: Path, say: Callable[[Checked], None] = lambda _: None) -> list[Checked]:
    """A training step on every device that the torch of this Python shows; each result goes to `say` at once.

    A process that a device ends (a crash in the driver, an illegal instruction) is that device's failure, and the
    devices after it are checked by a new one. A torch that does not import is one failure, of the device "torch".
    """
    results: list[Checked] = []
    while True:
        devices, found, ending = _run(python, len(results), say)
        results += found
        if devices is None:
            failed = Checked("torch", False, error=ending)
        elif len(results) < len(devices):
            failed = Checked(devices[len(results)], False, error=ending)
        else:
            return results
        results.append(failed)
        say(failed)
        if devices is None or len(results) == len(devices):
            return results


def _run(python: Path, skip: int, say: Callable[[Checked], None]) -> tuple[list[str] | None, list[Checked], str]:
    """(all devices or None, the results of one process, how it ended)."""
    command = [str(python), str(Path(training_step.__file__)), str(skip)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return None, [], f"no answer within {TIMEOUT_S:g} s"
    except OSError as error:
        return None, [], f"{python} does not start: {error}"
    devices: list[str] | None = None
    found = []
    for line in done.stdout.splitlines():
        if not line.startswith("{"):
            continue  # a library that prints
        values = json.loads(line)
        if "devices" in values:
            devices = values["devices"]
        else:
            found.append(Checked(**values))
            say(found[-1])
    last = ["", *done.stderr.strip().splitlines()][-1]
    ended = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    return devices, found, f"{ended}: {last}" if last else ended
