import sys

import pytest

from uneven.hardware.torchbuild import Support, arch_support, installed_version, read_torch, release
from uneven.hardware.wheels import choose, how_to_cover, oldest_driver, pick_wheel

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


@pytest.mark.parametrize(
    ("sms", "driver", "tag"),
    [
        (["sm_86"], "13.0", "cu130"),
        (["sm_86"], None, "cu130"),
        (["sm_86"], "12.4", "cu126"),
        (["sm_61"], "13.0", "cu126"),
        (["sm_61", "sm_89"], "13.0", "cu126"),
        (["sm_120"], "12.8", "cu128"),
        (["sm_70", "sm_120"], "13.0", "cu128"),
        (["sm_75", "sm_121"], "13.0", "cu130"),
        (["sm_61", "sm_120"], "13.0", None),
        (["sm_37"], "13.0", None),
    ],
)
def test_which_wheel_covers(sms: list[str], driver: str | None, tag: str | None) -> None:
    wheel = pick_wheel(sms, driver)
    assert (wheel.tag if wheel else None) == tag


def test_a_span_that_no_wheel_covers_is_built_from_source() -> None:
    text = how_to_cover(["sm_120", "sm_61"], "13.0")
    assert "no prebuilt torch covers sm_61 to sm_120" in text
    assert "uneven torch build --archs '6.1;12.0'" in text
    assert "CUDA 12.8 or 12.9" in text


def test_a_wheel_is_setup_or_a_pip_command() -> None:
    text = how_to_cover(["sm_61"], "12.6")
    assert text.startswith("uneven setup")
    assert "pip install --force-reinstall 'torch>=2.8,<2.15' --index-url https://download.pytorch.org/whl/cu126" in text


def test_gpus_that_no_torch_runs_on_are_left_out_of_the_choice() -> None:
    choice = choose(["sm_37", "sm_86"], "13.0")
    assert (choice.kind, choice.sms, choice.too_old) == ("wheel", ("sm_86",), ("sm_37",))
    assert choose(["sm_35"], "11.4").kind == "nothing"
    assert "train on the CPU" in how_to_cover(["sm_35"], "11.4")


def test_a_gpu_newer_than_every_wheel_takes_the_ptx_of_the_newest() -> None:
    choice = choose(["sm_130"], "13.3")
    assert choice.wheel is not None
    assert (choice.kind, choice.wheel.tag, choice.is_jit) == ("wheel", "cu130", True)
    assert choose(["sm_86"], "13.3").is_jit is False


def test_on_arm_servers_the_wheels_have_other_archs() -> None:
    assert choose(["sm_75"], "13.0", "aarch64").kind == "source"
    wheel = choose(["sm_110"], "13.0", "aarch64").wheel
    assert wheel is not None
    assert wheel.tag == "cu130"


def test_a_driver_too_old_for_every_wheel_that_covers() -> None:
    text = how_to_cover(["sm_86"], "11.8")
    assert "update the NVIDIA driver to 525.60.13 or newer (for cu126), or 580.65.06 or newer (for cu130)" in text
    assert "580" not in how_to_cover(["sm_61"], "11.8")
    assert oldest_driver("13.0") == "580.65.06"
    assert oldest_driver("nonsense") is None
