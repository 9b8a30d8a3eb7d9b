"""A new build from wheels: what is planned for each variant, that it fits, and one real installation."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import uneven
from tests.install.fake_builds import FAKE_TORCH, add_build, make_wheel
from uneven.errors import InputError, MachineError
from uneven.hardware.gpus import Gpu, GpuReport
from uneven.install import builds, new_build
from uneven.install.new_build import BuildPlan, check_space, make_build, own_package, plan_build

ROOT = Path(uneven.__file__).parent.parent


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNEVEN_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize(
    ("variant", "spec"),
    [
        ("cpu", "torch>=2.8"),
        ("cu126", "torch>=2.8,<2.15"),
        ("cu128", "torch>=2.8,<2.11"),
        ("cu130", "torch>=2.9"),
        ("rocm7.1", "torch>=2.10"),
        ("cu129", "torch>=2.8"),
    ],
)
def test_a_variant_has_its_index_and_versions(variant: str, spec: str, tmp_path: Path) -> None:
    plan = plan_build(variant)
    assert (plan.name, plan.variant, plan.torch) == (variant, variant, spec)
    assert plan.index_url is not None
    assert plan.index_url.endswith(f"/whl/{variant}")
    assert plan.folder == tmp_path / "home" / "torch" / variant
    assert plan.disk_bytes > plan.download_bytes > 0  # type: ignore[operator]


def test_a_version_a_name_and_an_index_of_ones_own() -> None:
    plan = plan_build("cu126", version="2.9.1")
    assert (plan.name, plan.torch) == ("cu126-2.9.1", "torch==2.9.1")
    plan = plan_build("cpu", name="other", index_url="https://example.org/simple")
    assert (plan.name, plan.index_url) == ("other", "https://example.org/simple")


@pytest.mark.parametrize(
    ("variant", "more"),
    [
        ("gpu", {}),
        ("cuda12.6", {}),
        ("cu12", {}),
        ("rocm", {}),
        ("cpu", {"version": "2.5.1"}),
        ("cpu", {"version": "newest"}),
        ("cpu", {"name": "../cpu"}),
        ("absent.whl", {}),
    ],
)
def test_what_does_not_exist_is_refused(variant: str, more: dict[str, str]) -> None:
    with pytest.raises(InputError):
        plan_build(variant, **more)


@pytest.mark.parametrize(
    ("sms", "variant"), [([], "cpu"), (["sm_61"], "cu126"), (["sm_86", "sm_120"], "cu130"), (["sm_61", "sm_120"], None)]
)
def test_auto_is_what_covers_this_machine(sms: list[str], variant: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(Gpu(index, "GPU", sm=sm) for index, sm in enumerate(sms))
    report = GpuReport(gpus, driver="580.65.06", driver_cuda="13.0") if gpus else GpuReport(reason="none")
    monkeypatch.setattr("uneven.install.machine.read_gpus", lambda: report)
    monkeypatch.setattr("uneven.install.machine.read_cards", lambda: ())
    if variant is not None:
        assert plan_build("auto").variant == variant
    else:
        with pytest.raises(
            MachineError, match=r"no wheel covers sm_61 beside sm_120.*uneven torch build --archs '6.1;12.0'"
        ):
            plan_build("auto")


def test_a_wheel_of_ones_own(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "torch", "2.13.0+sm61.sm120", FAKE_TORCH)
    plan = plan_build(str(wheel))
    assert (plan.name, plan.torch, plan.index_url) == ("2.13.0+sm61.sm120", str(wheel), None)
    other = make_wheel(tmp_path, "numpy", "2.0", {})
    with pytest.raises(InputError, match="is not a wheel of torch"):
        plan_build(str(other))
    with pytest.raises(InputError, match="leave --version out"):
        plan_build(str(wheel), version="2.13.0")


def test_too_little_space_is_told_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uneven.install.new_build.shutil.disk_usage", lambda path: SimpleNamespace(free=5 * 10**9))
    check_space(plan_build("cpu"))
    with pytest.raises(MachineError, match=r"cu126 needs about 12\.0 GB .* has 5\.0 GB free"):
        make_build(plan_build("cu126"), print)
    assert not (tmp_path / "home").exists()


def test_a_build_that_is_there_is_not_replaced() -> None:
    folder = add_build("cpu")
    with pytest.raises(InputError, match="build 'cpu' is there"):
        make_build(plan_build("cpu"), print)
    assert (folder / builds.RECORD).exists()


def test_the_same_uneven_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_package() == ("-e", str(ROOT))
    installed = tmp_path / "site-packages" / "uneven" / "__init__.py"
    monkeypatch.setattr(uneven, "__file__", str(installed))
    wheel = tmp_path / "my wheel.whl"
    origins: list[tuple[dict[str, Any] | None, tuple[str, ...]]] = [
        (None, (f"uneven=={uneven.__version__}",)),
        ({"url": f"file://{tmp_path}/my%20wheel.whl", "archive_info": {}}, (str(wheel),)),
        ({"url": "file:///gone.whl", "archive_info": {}}, (f"uneven=={uneven.__version__}",)),
        (
            {"url": "https://example.org/uneven", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            ("uneven @ git+https://example.org/uneven@abc",),
        ),
    ]
    wheel.touch()
    for origin, expected in origins:
        text = None if origin is None else json.dumps(origin)
        found = SimpleNamespace(read_text=lambda name, text=text: text)
        monkeypatch.setattr(new_build, "distribution", lambda name, found=found: found)
        assert own_package() == expected


@pytest.mark.soak
def test_a_real_installation_is_interrupted_goes_on_and_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip without a network: a torch of a few lines, and of uneven the one module that describes it."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    make_wheel(wheels, "torch", "2.13.0+cu126", FAKE_TORCH)
    modules = ("__init__.py", "errors.py", "version.py", "hardware/__init__.py", "hardware/torchbuild.py")
    make_wheel(wheels, "uneven", "9.9", {f"uneven/{name}": (ROOT / "uneven" / name).read_text() for name in modules})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    folder = builds.builds_folder() / "cu126"
    plan = BuildPlan("cu126", "cu126", "torch==2.13.0", None, ("uneven==9.10",), folder, 1, 1)
    said: list[str] = []
    with pytest.raises(MachineError, match=r"uneven==9\.10"):
        make_build(plan, said.append)
    assert builds.unfinished_builds() == ["cu126"]
    build = make_build(BuildPlan(**{**vars(plan), "uneven": ("uneven==9.9",)}), said.append)
    assert any("already satisfied: torch" in line for line in said)  # the first call's
    assert builds.list_builds() == [build]
    assert (build.version, build.cuda, build.archs) == ("2.13.0+cu126", "12.6", ("sm_50", "sm_60"))
    assert build.python_version == ".".join(map(str, sys.version_info[:3]))
    assert build.size_bytes > 1_000_000  # pip is in it
    builds.remove("cu126")
    assert not folder.exists()
