"""Precision of a step: fp32, bf16 by autocast, fp16 by autocast with a loss scaler.

Params and optimizer state stay fp32 in each, so averages and checkpoints are never in half precision.

On some slices of a GPU cuBLAS multiplies wrong in bf16 and fp16, or gives NaN, without an error and without uneven: on
an H200 with torch 2.11 on those of 40, 55, 60, 66 and 80 %, never on those of 24, 50 and 100 %, and never in fp32.
Which shapes are wrong differs from slice to slice; the one below was wrong on all of them, in every repeat. So it is
tried before training on every slice that computes in half precision (`check_slice`).
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from uneven.errors import MachineError
from uneven.hardware.device import Device
from uneven.hardware.mps import name_slice

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROWS, INNER = 768, 4096  # (768 x 4096) @ (4096 x 768)
WRONG = 0.25  # of the standard deviation of the product: rounding is below 0.05, wrong products are at 1 and above


class Precision:
    """The autocast region of one device and, for fp16, its scaler."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.device = device
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")
        self.is_scaled = self.scaler.is_enabled()
        self.is_stepping = False  # an optimizer: whoever else steps it is the user's script (api/batch_steps.py)
        # Makes its tensors: a rank without samples steps, too, and has scaled no loss before.
        self.scaler.scale(torch.ones((), device=device))

    def step(self, optimizer: Optimizer) -> None:
        """Every update of a run goes through here."""
        self.is_stepping = True
        try:
            if self.is_scaled:
                self.scaler.step(optimizer)
                self.scaler.update()
            else:
                optimizer.step()
        finally:
            self.is_stepping = False

    def region(self) -> AbstractContextManager[object]:
        if self.name == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=HALF[self.name])


@contextmanager
def device_flags(device: torch.device) -> Iterator[None]:
    """CUDA flags of a run, restored afterwards: TF32, and cuDNN kernels chosen by measuring."""
    if device.type != "cuda":
        yield
        return
    saved = torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    try:
        with torch.cuda.device(device):
            yield
    finally:
        torch.backends.cudnn.benchmark = saved[0]
        torch.set_float32_matmul_precision(saved[1])


def check_slice(device: Device, precision: str, model: nn.Module) -> None:
    """MachineError where the device is a slice that is wrong in a half precision that the run computes in."""
    name = name_slice(device)
    if name is None:
        return
    params = list(model.parameters())
    dtypes = {param.dtype for param in params}
    check_products(name, params[0].device, [kind for kind in HALF if kind == precision or HALF[kind] in dtypes])


def check_products(
    name: str,
    device: torch.device,
    precisions: Collection[str],
    product: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> None:
    """MachineError where `product` (torch.mm) in one of these is far from that in fp32; `name` is the slice's."""
    product = product or torch.mm
    generator = torch.Generator(device).manual_seed(0)  # the run's own random numbers stay as they are
    for precision in precisions:
        shapes = ((ROWS, INNER), (INNER, ROWS))
        left, right = (torch.randn(shape, generator=generator, device=device).to(HALF[precision]) for shape in shapes)
        exact = product(left.float(), right.float())
        off = float((product(left, right).float() - exact).abs().max() / exact.std())
        if not off < WRONG:  # NaN, too
            raise MachineError(
                f"device {name!r}: plain PyTorch's matmul computes wrong numbers in {precision} on this slice of the "
                f"GPU: {ROWS} x {INNER} by {INNER} x {ROWS} differs from fp32 by {off:.2g} standard deviations (torch "
                f"{torch.__version__}); take another percentage, such as 50 or 24, or precision='fp32' and params in "
                "fp32"
            )
