"""One list of settings: everything that repeats a field of RunConfig is compared with it.

The committed api/settings.py and the tables of docs/settings.md are what tools/settings.py would write today.
"""

import importlib.util
import inspect
from collections.abc import Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from typer.testing import CliRunner

from uneven.api.builder import Builder
from uneven.api.settings import SettingMethods, Settings
from uneven.cli import run as run_verb
from uneven.cli.main import app
from uneven.config import RunConfig, Setting, check_settings, resolve, settings_of

ROOT = Path(__file__).parent.parent
SETTINGS = settings_of(RunConfig)
NAMES = SETTINGS | {setting.alias: setting for setting in SETTINGS.values() if setting.alias is not None}


def load_tool() -> Any:
    spec = importlib.util.spec_from_file_location("settings_tool", ROOT / "tools" / "settings.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def input_type(setting: Setting) -> Any:
    """What a user may pass: any sequence where RunConfig holds a tuple, text where it holds a path."""
    members = [
        str | Path if member is Path else Sequence[get_args(member)[0]] if get_origin(member) is tuple else member
        for member in setting.members
    ]
    has_none = type(None) in get_args(setting.type)
    return reduce(or_, [*members, *([None] if has_none else [])])


def test_the_committed_files_are_up_to_date() -> None:
    tool = load_tool()
    assert tool.MODULE.read_text() == tool.render_module(), "run: python tools/settings.py"
    page = tool.PAGE.read_text()
    assert page == tool.render_page(page), "run: python tools/settings.py"


def test_num_epochs_is_the_only_alias() -> None:
    assert set(NAMES) - set(SETTINGS) == {"num_epochs"}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=lambda setting: setting.name)
def test_every_setting_is_described_by_one_short_sentence(setting: Setting) -> None:
    assert setting.help[0].isupper()
    assert setting.help.endswith(".")
    assert ". " not in setting.help
    assert len(setting.help) <= 106  # a docstring line of the generated module
    assert setting.help.isascii()
    assert setting.default is not None or setting.none, "what None means"


def test_the_keywords_of_fit_are_the_fields_with_their_types() -> None:
    assert get_type_hints(Settings) == {name: input_type(setting) for name, setting in NAMES.items()}


@pytest.mark.parametrize("name", NAMES)
def test_the_builder_has_a_typed_method_for_every_setting(name: str) -> None:
    setting = NAMES[name]
    method = getattr(SettingMethods, name)
    _, parameter = inspect.signature(method).parameters.values()
    assert (parameter.name, parameter.annotation) == (name, input_type(setting))
    assert parameter.default is (True if setting.type is bool else inspect.Parameter.empty)
    builder = Builder(None, None, lambda *_: None)
    value: Any = object()
    assert getattr(builder, name)(value) is builder
    assert builder._settings == {setting.name: value}


def test_the_builder_has_no_other_methods_of_settings() -> None:
    public = {name for name in vars(SettingMethods) if not name.startswith("_")}
    assert public == {*NAMES, "settings"}


# A value of each setting as it is typed on the command line, and what it means.
TYPED = {
    "batch_size": ("8", 8),
    "epochs": ("3", 3),
    "max_steps": ("100", 100),
    "policy": ("async", "async"),
    "devices": ("cpu,cpu@0.4", "cpu,cpu@0.4"),
    "backend": ("cpu", "cpu"),
    "seed": ("5", 5),
    "accumulate": ("2", 2),
    "global_batch_size": ("64", 64),
    "max_global_batch_size": ("256", 256),
    "shares": ("5,2", (5.0, 2.0)),
    "strategy": ("fsdp", "fsdp"),
    "memory_shares": ("15,6", (15.0, 6.0)),
    "redundancy": ("1", 1),
    "memory_cap": ("64,16", (64, 16)),
    "bucket_mb": ("25", 25.0),
    "activations": ("recompute", "recompute"),
    "sync_batchnorm": (None, True),
    "check_loss": (None, True),
    "max_grad_norm": ("1.5", 1.5),
    "max_grad_value": ("0.5", 0.5),
    "max_bad_steps": ("5", 5),
    "lr_scale": ("sqrt", "sqrt"),
    "scheduler_interval": ("epoch", "epoch"),
    "anchor": ("10", 10),
    "max_anchor": ("50", 50),
    "overhead_target": ("0.05", 0.05),
    "divergence_threshold": ("0.1", 0.1),
    "max_staleness": ("4", 4),
    "optimizer_state": ("average", "average"),
    "verify": (None, True),
    "shuffle": (None, True),
    "drop_last": (None, True),
    "precision": ("bf16", "bf16"),
    "compile": ("graph", "graph"),
    "num_workers": ("1", 1),
    "eval_every": ("500 steps", "500 steps"),
    "monitor": ("loss", "loss"),
    "monitor_mode": ("max", "max"),
    "save_every": ("2", 2),
    "keep_last": ("3", 3),
    "keep_best": ("1", 1),
    "checkpoint_copies": ("2", 2),
    "resume": ("auto", "auto"),
    "out": ("runs/a", "runs/a"),
    "overwrite": (None, True),
    "replay": ("runs/b", "runs/b"),
    "deadline": ("none", None),
    "grace": ("0", 0.0),
    "on_fault": ("end", "end"),
    "min_ranks": ("2", 2),
    "restarts": ("1", 1),
    "skip": ("data,clock", "data,clock"),
    "progress": ("off", "off"),
}


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The settings that `uneven run` passes on."""
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr("uneven.launch.script.run_script", lambda script, settings: seen.append(settings))
    return seen


def test_every_setting_is_an_option_of_uneven_run(given: list[dict[str, Any]]) -> None:
    assert set(TYPED) == set(SETTINGS)
    line = [word for name, (text, _) in TYPED.items() for word in (SETTINGS[name].flag, text) if word is not None]
    done = CliRunner().invoke(app, ["run", "t.py", *line])
    assert done.exit_code == 0, done.output
    assert given == [{name: value for name, (_, value) in TYPED.items()}]
    for name, value in given[0].items():
        check_settings({name: value})


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ([], {}),
        (["--num-epochs", "4"], {"epochs": 4}),
        (["--no-verify", "--no-sync-batchnorm"], {"verify": False, "sync_batchnorm": False}),
        (["--lr-scale", "0.5"], {"lr_scale": 0.5}),
        (["--memory-cap", "64"], {"memory_cap": 64}),
        (["--global-batch-size", "auto"], {"global_batch_size": "auto"}),
    ],
)
def test_options_in_other_forms(line: list[str], expected: dict[str, Any], given: list[dict[str, Any]]) -> None:
    assert CliRunner().invoke(app, ["run", "t.py", *line]).exit_code == 0
    assert given == [expected]


def test_the_help_of_uneven_run_has_every_option_and_choice() -> None:
    text = " ".join(
        str(parameter.annotation.__metadata__[0].help) + str(parameter.annotation.__metadata__[0].metavar)
        for parameter in inspect.signature(run_verb.run).parameters.values()
    )
    assert all(setting.help in text for setting in SETTINGS.values())
    assert all(word in text for setting in SETTINGS.values() for word in setting.choices)


def test_defaults_pass_their_own_checks() -> None:
    config = resolve({"batch_size": 1, "epochs": 1})
    for name, setting in SETTINGS.items():
        setting.check(getattr(config, name))
        assert setting.is_required or getattr(config, name) == setting.default
