"""The folder of builds: what is listed, which is active, and that nothing but ours is ever deleted."""

import errno
import json
from pathlib import Path

import pytest

from tests.install.fake_builds import CPU, CU126, add_build
from uneven.errors import InputError, MachineError
from uneven.hardware.gpus import Gpu
from uneven.install import builds


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


def test_what_is_being_installed_is_not_removed() -> None:
    with builds.installing("cpu", {"torch": "torch>=2.8"}) as folder:
        (folder / "downloaded").touch()
        with pytest.raises(MachineError, match="'cpu' is being installed or removed by another process"):
            builds.remove("cpu")
        assert (folder / "downloaded").exists()
        assert json.loads((folder / builds.MARK).read_text()) == {"torch": "torch>=2.8"}
    builds.remove("cpu")
    assert not folder.exists()


@pytest.mark.parametrize(
    "wrong",
    [{"size_bytes": "x"}, {"size_bytes": None}, {"archs": "sm_50"}, {"archs": [50]}, {"version": 2.13}, {"cuda": 12.6}],
)
def test_a_record_with_a_value_of_another_type_is_not_read(wrong: dict[str, object]) -> None:
    add_build("cu126", {**CU126, **wrong})
    assert builds.list_builds() == []


def test_an_installation_marks_its_folder_locks_it_and_leaves_it_to_the_next() -> None:
    with builds.installing("cpu", {"torch": "torch>=2.8"}) as folder:
        (folder / "downloaded").touch()
        with pytest.raises(MachineError, match="by another process"), builds.installing("cpu", {}):
            pass
    assert builds.unfinished_builds() == ["cpu"]
    with builds.installing("cpu", {"torch": "torch>=2.9"}) as folder:
        assert (folder / "downloaded").exists()
        assert json.loads((folder / builds.MARK).read_text()) == {"torch": "torch>=2.9"}
    (builds.builds_folder() / "mine").mkdir()
    (builds.builds_folder() / "mine" / "file").touch()
    with pytest.raises(InputError, match="was not made by uneven"), builds.installing("mine", {}):
        pass


ANSWER = '{"installed": true, "version": "2.13.0+cu126", "cuda": "12.6", "hip": null, "archs": ["sm_50"]}'


def test_an_environment_says_itself_what_its_torch_is() -> None:
    with builds.installing("cu126", {}) as folder:
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
    with pytest.raises(MachineError, match=why), builds.installing("x", {}):
        builds.record(folder, "")
    assert builds.list_builds() == []
    assert builds.unfinished_builds() == ["x"]


def test_which_gpus_a_build_covers() -> None:
    gpus = [Gpu(0, "GTX 1060", sm="sm_61"), Gpu(1, "RTX 5060", sm="sm_120"), Gpu(2, "?")]
    archs = ("sm_50", "sm_60")
    assert builds.coverage("12.6", None, archs, gpus) == {"sm_61": "OK", "sm_120": "MISSING"}
    assert builds.coverage("12.6", None, (*archs, "compute_90"), gpus) == {"sm_61": "OK", "sm_120": "JIT"}
    assert builds.coverage(None, None, (), gpus) == {"sm_61": "MISSING", "sm_120": "MISSING"}
    for cuda, hip, known, cards in ((None, "6.4", archs, gpus), ("12.6", None, (), gpus), ("12.6", None, archs, [])):
        assert builds.coverage(cuda, hip, known, cards) is None
