"""Whether an installed torch trains: one step on every device, in a process that may die of it.

`check_devices` runs this file by the Python whose torch is checked. So it imports nothing of uneven: it also runs in
environments that have none. Each device is a line of JSON; the first line lists them.
"""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    devices after it are not checked. A torch that does not import is one failure, of the device "torch".
    """
    devices, results, ending = _run(python, say)
    if devices is None or len(results) < len(devices):
        results.append(Checked("torch" if devices is None else devices[len(results)], False, error=ending))
        say(results[-1])
    return results


def _run(python: Path, say: Callable[[Checked], None]) -> tuple[list[str] | None, list[Checked], str]:
    """(all devices or None, the results, how the process ended)."""
    try:
        done = subprocess.run([str(python), __file__], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
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


def devices() -> list[str]:
    """The CPU and every device that torch calls cuda, those of ROCm included."""
    import torch

    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]


def train(device: str) -> dict[str, Any]:
    """Forward, backward and a step of the optimizer; ok if the loss is finite and the weights have moved."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    # A convolution and a matrix product: cuDNN or MIOpen, and cuBLAS or hipBLAS.
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, labels = torch.randn(32, 1, 16, 16).to(device), torch.arange(32).remainder(10).to(device)
    before = [param.detach().clone() for param in model.parameters()]
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    moved = all(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    value = float(loss.detach())
    name = "" if device == "cpu" else torch.cuda.get_device_name(device)
    ok = math.isfinite(value) and moved
    error = None if ok else f"loss {value}, weights {'moved' if moved else 'did not move'}"
    return {"device": device, "name": name, "ok": ok, "loss": value if ok else None, "error": error}


def main() -> None:
    found = devices()
    print(json.dumps({"devices": found}), flush=True)
    for device in found:
        try:
            result = train(device)
        except Exception as error:
            lines = [*str(error).strip().splitlines(), type(error).__name__]
            result = {"device": device, "name": "", "ok": False, "loss": None, "error": lines[0]}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file, whose modules are none that torch looks for
    main()
