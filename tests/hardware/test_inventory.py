import sys

import pytest

from uneven.hardware.gpus import read_visible
from uneven.hardware.torchbuild import TorchBuild, read_torch

from .fakes import CPU_BUILD, GTX_1060, RTX_5060_TI, TWO_GPUS, make_torch


def test_the_number_is_cudas_and_the_facts_are_the_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    # CUDA numbers the GPUs the other way round here; the cores must follow the UUID.
    monkeypatch.setitem(sys.modules, "torch", make_torch(gpus=(GTX_1060, RTX_5060_TI)))
    first, second = read_visible(read_torch(), TWO_GPUS).gpus
    assert (first.index, first.name, first.cores) == (0, GTX_1060.name, 1280)
    assert (second.index, second.name, second.cores) == (1, RTX_5060_TI.name, 4608)


@pytest.mark.parametrize(
    ("build", "error"),
    [
        (TorchBuild(installed=False), "torch is not installed"),
        (TorchBuild(installed=True, error="OSError: libcudart"), "torch does not import"),
        (CPU_BUILD, "torch 2.13.0+cpu is a CPU build"),
    ],
)
def test_no_cuda_for_a_reason(build: TorchBuild, error: str) -> None:
    visible = read_visible(build, TWO_GPUS)
    assert visible.gpus == ()
    assert visible.error == error
