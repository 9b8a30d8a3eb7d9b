import sys

import pytest

from uneven.hardware.torchbuild import Support, arch_support, installed_version, read_torch, release

from .fakes import CU128_ARCHS, make_torch


@pytest.mark.parametrize(
    ("sm", "archs", "support"),
    [
        ("sm_86", ["sm_80"], Support.OK),
        ("sm_80", ["sm_86"], Support.MISSING),
        ("sm_90", ["sm_80", "sm_86"], Support.MISSING),
        ("sm_90", ["sm_80", "compute_86"], Support.JIT),
        ("sm_86", ["compute_80", "sm_80"], Support.OK),
        ("sm_61", ["sm_60"], Support.OK),
        ("sm_61", list(CU128_ARCHS), Support.MISSING),
        ("sm_61", [*CU128_ARCHS, "compute_120"], Support.MISSING),
        ("sm_121", list(CU128_ARCHS), Support.OK),
        ("sm_120", ["sm_100"], Support.MISSING),
        ("sm_100", ["compute_90"], Support.JIT),
        ("sm_90", ["sm_90a"], Support.OK),
        ("sm_100", ["sm_90a", "compute_90a"], Support.MISSING),
        ("sm_103", ["sm_100a"], Support.MISSING),
        ("sm_103", ["sm_100f"], Support.OK),
        ("sm_103", ["compute_100f"], Support.JIT),
        ("sm_120", ["sm_100f", "compute_100f"], Support.MISSING),
        ("sm_86", [], Support.MISSING),
        ("sm_86", ["gfx90a", "what"], Support.MISSING),
        ("nonsense", ["sm_80"], Support.MISSING),
    ],
)
def test_which_code_runs_where(sm: str, archs: list[str], support: Support) -> None:
    assert arch_support(sm, archs) is support


def test_a_cuda_build_without_a_visible_gpu_still_tells_its_archs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", make_torch())
    build = read_torch()
    assert build.archs == CU128_ARCHS
    assert (build.version, build.cuda, build.nccl_version) == ("2.10.0+cu128", "12.8", "2.27.5")
    assert build.gloo
    assert not build.is_cpu_build


def test_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert read_torch().installed is False
    assert installed_version() is None


def test_the_torch_of_this_environment() -> None:
    torch = pytest.importorskip("torch")
    build = read_torch()
    assert build.version == str(torch.__version__)
    assert build.is_cpu_build == (torch.version.cuda is None and torch.version.hip is None)
    assert installed_version() is not None


@pytest.mark.parametrize(
    ("text", "found"),
    [("2.13.0+cpu", (2, 13)), ("2.9.0a0+git12", (2, 9)), ("12.8", (12, 8)), ("dev", None), (None, None)],
)
def test_release(text: str | None, found: tuple[int, int] | None) -> None:
    assert release(text) == found
