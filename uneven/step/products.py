"""Whether a slice of a GPU multiplies matrices right in half precision.

On some slices cuBLAS gives wrong numbers in bf16 and fp16, or NaN, without an error and without uneven: on an H200 with
torch 2.11 on those of 40, 55, 60, 66 and 80 %, never on those of 24, 50 and 100 %, and never in fp32. Which shapes are
wrong differs from slice to slice; the one below was wrong on all of them, in every repeat. So it is tried before
training on every slice that computes in half precision. Called by the engine.
"""

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from uneven.errors import MachineError
from uneven.hardware.device import Device
from uneven.hardware.mps import name_slice

ROWS, INNER = 768, 4096  # (768 x 4096) @ (4096 x 768)
WRONG = 0.25  # of the standard deviation of the product: rounding is below 0.05, wrong products are at 1 and above
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


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
