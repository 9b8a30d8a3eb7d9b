"""Scripts under `uneven run`: what keeps them from starting, whether they use uneven, what their errors show first."""

import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from tests.api.starts import HEAD
from uneven import InputError, RankError
from uneven.launch.control.known_runs import ended_runs
from uneven.launch.find_script import Script, uses_uneven
from uneven.launch.script import run_script
from uneven.launch.user_frames import show_user_frames, user_place


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """`uneven run` changes the process it runs a script in; put it back."""
    monkeypatch.setattr("uneven.launch.context._contexts", [])
    monkeypatch.setattr(sys, "argv", ["uneven"])
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch, os, numpy as np\nnet.eval()\n", False),
        ("from torch import nn\nimport helper\n", False),
        ("import package\n", False),
        ("# import uneven\nname = 'uneven'\n", False),
        ("import uneven\n", True),
        ("from uneven.data import datasets\n", False),
        ("import uneven.data\n", True),
        ("def main():\n    from uneven import fit\n", True),
        ("import trainer\n", True),
        ("import datasets\n", True),  # the one beside the script
        ("import wrapped.deep\n", True),
        ("import importlib\nimportlib.import_module(name)\n", True),
        ("exec(code)\n", True),
        ("import not_to_be_found\n", True),
        ("this is no Python", True),
    ],
)
def test_a_script_is_judged_by_what_it_can_import(source: str, expected: bool, tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("import json\n")
    (tmp_path / "trainer.py").write_text("import helper\nfrom uneven import fit\n")
    (tmp_path / "datasets.py").write_text("from uneven import TensorData\n")
    for package, content in (("package", "import torch\n"), ("wrapped", "from . import deep\n")):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(content)
    (tmp_path / "wrapped" / "deep.py").write_text("import uneven\n")
    (tmp_path / "script.py").write_text(source)
    assert uses_uneven(Script(tmp_path / "script.py")) is expected


@pytest.mark.usefixtures("clean")
def test_ranks_that_never_called_uneven_are_told_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("import sys, uneven\nprint('trained')\nsys.exit(0)\n")
    with pytest.raises(InputError, match=r"t.py ended without calling uneven: it ran 2 times.*call fit or Ddp.setup"):
        run_script(Script(tmp_path / "t.py"), {"devices": "cpu,cpu"})


@pytest.mark.usefixtures("clean")
def test_on_one_device_a_line_says_that_uneven_was_not_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.py").write_text("print('trained')\n")
    run_script(Script(tmp_path / "t.py"), {"devices": "cpu", "policy": "async"})
    out, err = capsys.readouterr()
    assert out == "trained\n"
    assert "ended without calling uneven: it ran as by python, and the settings devices, policy had no effect" in err
    (tmp_path / "t.py").write_text("from uneven import Ddp\nDdp.rank()\n")
    run_script(Script(tmp_path / "t.py"), {"devices": "cpu"})
    assert capsys.readouterr().err == ""


FAILS = """
from uneven import Ddp

def loss_of(batch):
    raise ValueError("boom")

Ddp.rank()
loss_of(3)
"""


@pytest.mark.usefixtures("clean")
def test_the_error_of_a_rank_begins_with_the_users_frame(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(FAILS)
    with pytest.raises(RankError) as caught:
        run_script(Script(tmp_path / "t.py"), {"devices": "cpu,cpu"})
    first, place, _, _, _, frame, *_ = str(caught.value).splitlines()
    assert first.endswith("failed: ValueError: boom")
    assert place == "  at t.py:5, in loss_of"
    assert frame == f'  File "{tmp_path / "t.py"}", line 8, in <module>'
    assert "runpy" not in str(caught.value)
    assert "/uneven/launch/" not in str(caught.value)


TRAINS = """
import torch
from uneven import fit

fit(
    model=lambda: torch.nn.Linear(4, 1), optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    step=lambda model, batch: model(batch).square().mean(), dataset=torch.ones(400, 4), batch_size=4, epochs=2,
)
"""


@pytest.mark.usefixtures("clean")
def test_the_history_has_all_steps_and_samples_of_a_run(tmp_path: Path) -> None:
    """It had those of the last heartbeat before the end."""
    script = tmp_path / "t.py"
    script.write_text(TRAINS)
    run_script(Script(script), {"devices": "cpu,cpu", "policy": "sync"})
    (record,) = [run for run in ended_runs() if run["script"] == str(script)]
    assert (record["result"], record["samples"], record["slot"]) == ("finished", 800, 100)


ENDS = """
import os, sys
import torch
from uneven import fit

def step(model, batch):
    {how}

fit(
    model=lambda: torch.nn.Linear(4, 1), optimizer=lambda params: torch.optim.SGD(params, lr=0.1), step=step,
    dataset=torch.ones(16, 4), batch_size=4, epochs=2,
)
"""


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("how", ["sys.exit(0)", "os._exit(0)"])
def test_ranks_that_end_themselves_in_the_middle_of_their_run_have_not_trained_it(how: str, tmp_path: Path) -> None:
    """With exit code 0 the run counted as finished."""
    (tmp_path / "t.py").write_text(ENDS.format(how=how))
    with pytest.raises(RankError, match=r"rank [01] \(cpu.* ended with exit code 0 before its run was over"):
        run_script(Script(tmp_path / "t.py"), {"devices": "cpu,cpu"})


def test_a_script_that_does_not_compile_shows_its_line_alone(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("it's no Python\n")
    with pytest.raises(SyntaxError) as caught:
        runpy.run_path(str(tmp_path / "t.py"))
    show_user_frames(caught.value)
    assert traceback.format_exception(caught.value)[0] == f'  File "{tmp_path / "t.py"}", line 1\n'


def test_frames_of_ours_stay_only_where_the_error_is_ours() -> None:
    def users(_: object) -> None:
        raise ValueError("boom")

    for body, is_ours in ((users, False), (None, True)):
        with pytest.raises((ValueError, TypeError, AttributeError)) as caught:
            _through_ours(body)
        error = caught.value
        place = user_place(error)
        show_user_frames(error)
        files = []
        traceback = error.__traceback__
        while traceback is not None:
            files.append(Path(traceback.tb_frame.f_code.co_filename).name)
            traceback = traceback.tb_next
        assert files[0] == "test_script.py"
        assert (files[-1] == "units.py") is is_ours
        assert place is not None
        assert place.startswith("test_script.py:")


def _through_ours(body: object) -> None:
    """A call that goes through a function of the package and, where `body` is one, back to the caller's."""
    from uneven.parallel.units import blocks_of

    class Model:
        def modules(self) -> list[object]:
            assert callable(body)
            body(self)
            return []

    blocks_of(Model() if body is not None else None)  # type: ignore[arg-type]


@pytest.mark.usefixtures("clean")
def test_with_one_device_the_script_runs_in_this_process(tmp_path: Path) -> None:
    (tmp_path / "here.py").write_text(
        HEAD
        + "state = fit(model=net, optimizer=sgd, step=loss_of, dataset=TensorData(X, Y), batch_size=16, epochs=2)\n"
        "import os\n"
        "Path(sys.argv[1]).write_text(json.dumps([os.getpid(), __name__, sys.argv[2:], state.config]))\n"
    )
    given = {"devices": "cpu", "epochs": 1, "seed": 9, "progress": "off"}
    run_script(
        Script(
            tmp_path / "here.py",
            (
                str(tmp_path / "facts"),
                "--flag",
            ),
        ),
        given,
    )
    pid, name, args, used = json.loads((tmp_path / "facts").read_text())
    assert (pid, name, args) == (os.getpid(), "__main__", ["--flag"])
    assert (used["devices"], used["epochs"], used["seed"], used["batch_size"]) == ("cpu", 1, 9, 16)


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("wrong", [{"strategy": "zero9"}, {"policy": "fast"}, {"optimizer_state": "drop"}])
def test_a_setting_that_is_wrong_by_itself_is_refused_before_anything_starts(
    wrong: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "t.py").write_text("raise AssertionError('it ran')\n")
    monkeypatch.setattr("uneven.launch.script.run_on_ranks", lambda *_: pytest.fail("ranks were started"))
    ((name, value),) = wrong.items()
    with pytest.raises(InputError, match=f"{name}='{value}' must be one of"):
        run_script(Script(tmp_path / "t.py"), {"devices": "cpu,cpu", **wrong})


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("absent.py", {}, "there is no such file"),
        ("here.py", {"epohcs": 1}, "did you mean 'epochs'"),
        ("here.py", {"devices": "cpu,tpu"}, "tpu"),
    ],
)
def test_a_run_that_cannot_start_says_why(name: str, settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "here.py").write_text("raise AssertionError('it must not run')")
    with pytest.raises(InputError) as caught:
        run_script(Script(tmp_path / name), settings)
    assert words in str(caught.value)
