"""One training step on every device that torch shows here: run as a file by the Python whose torch is checked.

It imports torch and nothing of uneven, so that it also runs in environments that have no uneven. Each device is a line
of JSON; the first line lists them. `check.py` starts it, and starts it again behind a device that ended the process.
"""

import json
import math
import sys
from typing import Any


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


def main(skip: int) -> None:
    """Check all devices but the first `skip`."""
    found = devices()
    print(json.dumps({"devices": found}), flush=True)
    for device in found[skip:]:
        try:
            result = train(device)
        except Exception as error:
            lines = [*str(error).strip().splitlines(), type(error).__name__]
            result = {"device": device, "name": "", "ok": False, "loss": None, "error": lines[0]}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file, whose modules are none that torch looks for
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
