"""What a new project is called, where it may be written, and what it takes over from the machine."""

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from uneven import InputError, MachineError
from uneven.hardware.gpus import Gpu, GpuReport
from uneven.hardware.system import read_system
from uneven.templates.machine import Machine, describe_machine
from uneven.templates.project import check_folder, make_files, read_name, write_project

MACHINE = Machine("3.11", "/env/bin/python", "2.13.0", ("CPU with 2 cores (24 GiB)",), False, None, "")
PATHS = {"train.py": "new\n", "tests/test_train.py": "new\n"}


@pytest.mark.parametrize("name", ["demo", "my-project", "Net_2", "a", "v1.5", "some/where/demo"])
def test_a_name_that_a_package_can_have_is_taken(name: str) -> None:
    assert read_name(Path(name)) == Path(name).name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("my project", ("'my project'", "as in my-project")),
        ("2nd", ("'2nd'", "begin with a letter", "as in nd")),
        ("demo-", ("'demo-'", "as in demo")),
        ("torch", ("'torch' is taken", "my-torch")),
        ("Uneven", ("is taken",)),
        ("$(x)", ("as in x",)),
    ],
)
def test_another_name_is_refused_with_one_that_would_do(name: str, words: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as raised:
        read_name(Path(name))
    assert all(word in str(raised.value) for word in words), raised.value


def test_the_current_folder_gives_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path / "demo")
    assert read_name(Path()) == "demo"


def test_a_file_that_is_there_is_named_and_kept_unless_forced(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("mine\n")
    (tmp_path / "notes.txt").write_text("mine\n")
    with pytest.raises(InputError, match=r"has train\.py already: nothing was written.*--force"):
        check_folder(tmp_path, PATHS, force=False)
    assert (tmp_path / "train.py").read_text() == "mine\n"
    check_folder(tmp_path, PATHS, force=True)
    write_project(tmp_path, PATHS)
    assert (tmp_path / "train.py").read_text() == "new\n"
    assert (tmp_path / "notes.txt").read_text() == "mine\n"


def test_a_folder_with_other_files_is_refused_and_hidden_ones_do_not_count(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    check_folder(tmp_path, PATHS, force=False)
    check_folder(tmp_path / "new", PATHS, force=False)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(InputError, match=r"is not empty \(notes\.txt\)"):
        check_folder(tmp_path, PATHS, force=False)
    with pytest.raises(InputError, match="is a file"):
        check_folder(tmp_path / "notes.txt", PATHS, force=True)
    (tmp_path / "train.py").mkdir()
    with pytest.raises(InputError, match=r"folders where files.*train\.py"):
        check_folder(tmp_path, PATHS, force=True)


def test_a_file_where_a_folder_goes_is_refused_even_when_forced(tmp_path: Path) -> None:
    """Else files that come before those in the folder would be replaced, and then it fails."""
    place = tmp_path / "tests"
    place.touch()
    with pytest.raises(InputError, match="has files where folders of the project go: tests; move them away"):
        check_folder(tmp_path, PATHS, force=True)
    place.unlink()
    place.symlink_to(tmp_path / "absent")
    with pytest.raises(InputError, match="has files where folders"):
        check_folder(tmp_path, PATHS, force=True)
    place.unlink()
    place.mkdir()
    check_folder(tmp_path, PATHS, force=True)


def test_a_folder_that_cannot_be_looked_at_is_a_machine_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path, **_: object) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", denied)
    with pytest.raises(MachineError, match=r"cannot write to .*demo: no permission"):
        check_folder(tmp_path / "demo", PATHS, force=False)


def test_a_folder_that_cannot_be_written_to_is_a_machine_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MachineError, match="cannot write to"):
        write_project(tmp_path / "file" / "demo", PATHS)


def test_an_unknown_template_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(InputError, match="--template visoin: allowed are vision, text, own-loop, plain"):
        make_files("demo", "visoin", MACHINE)


def test_versions_and_devices_are_those_of_the_machine() -> None:
    made = make_files("Demo", "plain", MACHINE)
    assert "Found here: CPU with 2 cores (24 GiB)" in made["run.toml"]
    assert "Python 3.11, torch 2.13.0" in made["README.md"]
    assert '"/env/bin/python"' in made["Makefile"]
    assert "FROM python:3.11-slim" in made["Dockerfile"]
    assert "uneven setup -y" in made["Dockerfile"]
    assert "docker build -t demo ." in made["Dockerfile"]  # capitals are not allowed there
    assert 'name = "Demo"' in made["pyproject.toml"]


def test_an_image_for_gpus_names_the_torch_build_that_covers_them() -> None:
    cards = (Gpu(0, "RTX 5090", 32 << 30, "sm_120"), Gpu(1, "GTX 1080", 8 << 30, "sm_61"))
    system = read_system()
    system = replace(system, cpu=replace(system.cpu, architecture="x86_64"))
    one = describe_machine(system, GpuReport(cards[:1], driver_cuda="13.0"), None)
    both = describe_machine(system, GpuReport(cards, driver_cuda="13.0"), None)
    assert one.devices[0] == "RTX 5090 (32 GiB)"
    assert one.devices[-1].startswith("CPU with ")
    assert "no torch yet" in one.versions
    docker = make_files("demo", "vision", one)["Dockerfile"]
    assert "uneven setup -y --build cu130\n" in docker  # it would find no GPU while the image is built
    assert "# For RTX 5090 (32 GiB);" in docker
    assert "--gpus all" in docker
    docker = make_files("demo", "vision", both)["Dockerfile"]
    assert "# no prebuilt torch covers sm_61" in docker
    assert "--build" not in docker.replace("torch build --archs", "")
