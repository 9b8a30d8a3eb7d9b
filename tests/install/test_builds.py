"""The folder of builds: what is listed, which is active, and that nothing but ours is ever deleted."""

import errno
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import uneven
from tests.install.builds import ANSWER
from tests.install.fake_builds import CPU, CU126, FAKE_TORCH, add_build, make_wheel
from uneven.errors import InputError, MachineError
from uneven.hardware.gpus import Gpu, GpuReport
from uneven.install import builds, steps

ROOT = Path(uneven.__file__).parent.parent


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNEVEN_HOME", str(tmp_path / "home"))


def test_where_they_are(tmp_path: Path) -> None:
    assert builds.home({"UNEVEN_HOME": "/a", "XDG_DATA_HOME": "/b", "HOME": "/c"}) == Path("/a")
    assert builds.home({"XDG_DATA_HOME": "/b", "HOME": "/c"}) == Path("/b/uneven")
    assert builds.home({"XDG_DATA_HOME": "relative", "HOME": "/c"}) == Path("/c/.local/share/uneven")
    assert builds.home({"HOME": "/c"}) == Path("/c/.local/share/uneven")
    assert builds.builds_folder() == tmp_path / "home" / "torch"


def test_complete_ones_are_listed_by_name_and_others_are_not() -> None:
    assert builds.list_builds() == []
    add_build("cu126")
    folder = add_build("cpu", CPU)
    (builds.builds_folder() / "mine").mkdir()
    (builds.builds_folder() / "link").symlink_to(folder)
    (add_build("broken") / builds.RECORD).write_text("{")
    (add_build("older") / builds.RECORD).write_text("{}")
    half = add_build("half")
    (half / builds.RECORD).rename(half / builds.MARK)
    first, second = builds.list_builds()
    assert (first.name, first.kind, first.is_active) == ("cpu", "CPU", False)
    assert (second.name, second.kind, second.size_bytes) == ("cu126", "CUDA 12.6", CU126["size_bytes"])
    assert second.archs == tuple(CU126["archs"])  # type: ignore[arg-type]
    assert second.python == str(builds.builds_folder() / "cu126" / "bin" / "python")
    assert builds.unfinished_builds() == ["half"]
    with pytest.raises(InputError, match="not complete"):
        builds.find_build("half")
    with pytest.raises(InputError, match="no torch build 'cu999': there is cpu, cu126"):
        builds.find_build("cu999")


def test_one_is_active_or_none() -> None:
    add_build("cu126")
    add_build("cpu", CPU)
    builds.activate("cu126")
    builds.activate("cpu")
    assert [build.name for build in builds.list_builds() if build.is_active] == ["cpu"]
    with pytest.raises(InputError, match="no torch build 'none-such'"):
        builds.activate("none-such")
    assert builds.active_name() == "cpu"
    builds.activate(None)
    builds.activate(None)
    assert builds.active_name() is None


def test_a_home_that_is_a_file_is_a_machine_error(tmp_path: Path) -> None:
    (tmp_path / "home").touch()
    with pytest.raises(MachineError, match=r"cannot write to .*a part of the path is a file.*UNEVEN_HOME"):
        builds.activate(None)


def test_an_active_build_that_must_stay_so_is_not_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = add_build("cu126")
    builds.activate("cu126")
    unlink = Path.unlink

    def denied(path: Path, missing_ok: bool = False) -> None:
        if path.name == "active":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        unlink(path, missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", denied)
        with pytest.raises(MachineError, match="no permission to write"):
            builds.activate(None)
        with pytest.raises(MachineError, match="no permission to write"):
            builds.remove("cu126", force=True)
    assert builds.list_builds()[0].is_active
    assert (folder / "bin" / "python").exists()


@pytest.mark.parametrize("name", ["..", "../x", "a/b", "", ".hidden", "active", "none", "-x", "a b", "x" * 65])
def test_a_name_that_is_no_folder_of_ours_is_refused(name: str) -> None:
    add_build("cu126")
    with pytest.raises(InputError, match="a name has letters"):
        builds.remove(name, force=True)
    assert builds.list_builds()


def test_only_what_uneven_made_is_deleted(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / builds.RECORD).write_text("{}")
    folder = add_build("cu126")
    (folder / "lib").symlink_to(theirs)
    (builds.builds_folder() / "link").symlink_to(theirs)
    (builds.builds_folder() / "mine").mkdir()
    for name in ("link", "mine"):
        with pytest.raises(InputError, match="was not made by uneven"):
            builds.remove(name, force=True)
    builds.activate("cu126")
    with pytest.raises(InputError, match="is the active build"):
        builds.remove("cu126")
    assert (folder / "bin" / "python").exists()
    builds.remove("cu126", force=True)
    assert not folder.exists()
    assert builds.active_name() is None
    assert (theirs / builds.RECORD).exists()
    with pytest.raises(InputError, match="there is none yet"):
        builds.remove("cu126")


def test_a_removal_that_was_interrupted_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = add_build("cu126")

    def interrupted(path: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "iterdir", interrupted)
        with pytest.raises(KeyboardInterrupt):
            builds.remove("cu126")
    assert builds.list_builds() == []
    assert builds.unfinished_builds() == ["cu126"]
    builds.remove("cu126")
    assert not folder.exists()


@pytest.mark.parametrize("wrong", [{"archs": None}, {"archs": 50}])
def test_a_record_that_is_wrong_is_not_read(wrong: dict[str, object]) -> None:
    add_build("cu126", {**CU126, **wrong})
    assert builds.list_builds() == []


def test_an_installation_marks_its_folder_and_leaves_it_to_the_next() -> None:
    with builds.installing("cpu") as folder:
        (folder / "downloaded").touch()
    assert builds.unfinished_builds() == ["cpu"]
    with builds.installing("cpu") as folder:
        assert (folder / "downloaded").exists()
    (builds.builds_folder() / "mine").mkdir()
    (builds.builds_folder() / "mine" / "file").touch()
    with pytest.raises(InputError, match="was not made by uneven"), builds.installing("mine"):
        pass


def test_an_environment_says_itself_what_its_torch_is() -> None:
    with builds.installing("cu126") as folder:
        (folder / "bin").mkdir()
        python = folder / "bin" / "python"
        python.write_text(f"#!/bin/sh\necho noise\necho '{ANSWER}'\n")
        python.chmod(0o755)
        made = builds.record(folder, "torch of cu126")
    assert builds.list_builds() == [made]
    assert (made.version, made.archs, made.source) == ("2.13.0+cu126", ("sm_50",), "torch of cu126")
    assert made.size_bytes >= python.stat().st_size
    assert builds.unfinished_builds() == []


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'ImportError: libcudart.so.12' >&2; exit 1", "ImportError: libcudart.so.12"),
        ('echo \'{"installed": true, "error": "no libcublas"}\'', "no libcublas"),
        ("echo '{\"installed\": false}'", "it is not installed there"),
        ("echo hello", "cannot say which torch it has"),
    ],
)
def test_a_build_whose_torch_does_not_work_is_not_complete(script: str, why: str) -> None:
    folder = add_build("x", python=script)
    with pytest.raises(MachineError, match=why), builds.installing("x"):
        builds.record(folder, "")
    assert builds.list_builds() == []
    assert builds.unfinished_builds() == ["x"]


def test_which_gpus_a_build_covers() -> None:
    add_build("cu126", {**CU126, "archs": ["sm_50", "sm_60"]})
    (build,) = builds.list_builds()
    gpus = [Gpu(0, "GTX 1060", sm="sm_61"), Gpu(1, "RTX 5060", sm="sm_120"), Gpu(2, "?")]
    assert build.coverage(gpus) == {"sm_61": "OK", "sm_120": "MISSING"}
    with_ptx = replace(build, archs=(*build.archs, "compute_90"))
    assert with_ptx.coverage(gpus) == {"sm_61": "OK", "sm_120": "JIT"}
    assert replace(build, cuda=None, archs=()).coverage(gpus) == {"sm_61": "MISSING", "sm_120": "MISSING"}
    assert replace(build, cuda=None, hip="6.4").coverage(gpus) is None
    assert replace(build, archs=()).coverage(gpus) is None
    assert build.coverage([]) is None


@pytest.mark.parametrize(
    ("variant", "spec"),
    [
        ("cpu", "torch>=2.8"),
        ("cu126", "torch>=2.8,<2.15"),
        ("cu128", "torch>=2.8,<2.11"),
        ("cu130", "torch>=2.9"),
        ("cu129", "torch>=2.8"),
    ],
)
def test_a_variant_has_its_versions(variant: str, spec: str, tmp_path: Path) -> None:
    plan = builds.plan_build(variant)
    assert (plan.name, plan.source) == (variant, f"{spec} of {variant}")
    assert plan.folder == tmp_path / "home" / "torch" / variant
    assert spec in plan.steps[1].command


def test_a_version_a_name_and_an_index_of_ones_own() -> None:
    plan = builds.plan_build("cu126", version="2.9.1")
    assert (plan.name, plan.source) == ("cu126-2.9.1", "torch==2.9.1 of cu126")
    plan = builds.plan_build("cpu", name="other", index_url="https://example.org/simple")
    assert plan.name == "other"
    assert plan.steps[1].command[-1] == "https://example.org/simple"


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
        builds.plan_build(variant, **more)


@pytest.mark.parametrize(
    ("sms", "variant"), [([], "cpu"), (["sm_61"], "cu126"), (["sm_86", "sm_120"], "cu130"), (["sm_61", "sm_120"], None)]
)
def test_auto_is_what_covers_this_machine(sms: list[str], variant: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(Gpu(index, "GPU", sm=sm) for index, sm in enumerate(sms))
    report = GpuReport(gpus, driver="580.65.06", driver_cuda="13.0") if gpus else GpuReport(reason="none")
    monkeypatch.setattr("uneven.install.advice.read_gpus", lambda: report)
    monkeypatch.setattr("uneven.install.advice.has_nvidia_card", lambda: False)
    if variant is not None:
        assert builds.plan_build("auto").name == variant
    else:
        with pytest.raises(MachineError, match=r"sm_61 beside sm_120.*uneven torch build --archs '6.1;12.0'"):
            builds.plan_build("auto")


def test_a_wheel_of_ones_own(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "torch", "2.13.0+sm61.sm120", FAKE_TORCH)
    plan = builds.plan_build(str(wheel))
    assert (plan.name, plan.source) == ("2.13.0+sm61.sm120", wheel.name)
    assert plan.steps[1].command[-1] == str(wheel)
    for variant, version in ((make_wheel(tmp_path, "numpy", "2.0", {}), None), (wheel, "2.13.0")):
        with pytest.raises(InputError, match="allowed is the file of a wheel"):
            builds.plan_build(str(variant), version=version)


def test_a_build_that_is_there_is_not_replaced() -> None:
    folder = add_build("cpu")
    with pytest.raises(InputError, match="build 'cpu' is there"):
        builds.make_build(builds.plan_build("cpu"), print)
    assert (folder / builds.RECORD).exists()


def test_the_same_uneven_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert builds.own_package() == ("-e", str(ROOT))
    monkeypatch.setattr(uneven, "__file__", str(tmp_path / "site-packages" / "uneven" / "__init__.py"))
    vcs = {"url": "https://example.org/uneven", "vcs_info": {"vcs": "git", "commit_id": "abc"}}
    for origin, expected in (
        (None, f"uneven=={uneven.__version__}"),
        ({"url": "file:///my%20wheel.whl", "archive_info": {}}, "uneven @ file:///my%20wheel.whl"),
        (vcs, "uneven @ git+https://example.org/uneven@abc"),
    ):
        found = SimpleNamespace(read_text=lambda _, origin=origin: origin and json.dumps(origin))
        monkeypatch.setattr(builds, "distribution", lambda _, found=found: found)
        assert builds.own_package() == (expected,)


@pytest.mark.soak
def test_a_real_installation_is_interrupted_goes_on_and_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip without a network: a torch of a few lines, and of uneven the one module that describes it."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    make_wheel(wheels, "torch", "2.13.0+cu126", FAKE_TORCH)
    modules = ("__init__", "errors", "version", "hardware/__init__", "hardware/torchbuild", "hardware/optional")
    files = {f"uneven/{name}.py": (ROOT / "uneven" / f"{name}.py").read_text() for name in modules}
    make_wheel(wheels, "uneven", "9.9", files)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setattr(builds, "own_package", lambda: ("uneven==9.10",))
    monkeypatch.setattr(steps.shutil, "which", lambda _: None)
    said: list[str] = []
    with pytest.raises(MachineError, match=r"uneven==9\.10"):
        builds.make_build(builds.plan_build("cu126"), said.append)
    assert builds.unfinished_builds() == ["cu126"]
    monkeypatch.setattr(builds, "own_package", lambda: ("uneven==9.9",))
    build = builds.make_build(builds.plan_build("cu126"), said.append)
    assert any("already satisfied: torch" in line for line in said)  # the first call's
    assert builds.list_builds() == [build]
    assert (build.version, build.cuda, build.archs) == ("2.13.0+cu126", "12.6", ("sm_50", "sm_60"))
    assert build.size_bytes > 1_000_000  # pip is in it
    builds.remove("cu126")
    assert not Path(build.python).exists()
