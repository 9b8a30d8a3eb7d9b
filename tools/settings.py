"""Generate uneven/api/settings.py and the tables in docs/settings.md from the fields of RunConfig.

    python tools/settings.py            writes both
    python tools/settings.py --check    exit code 1 if a committed file differs

Run it after adding or changing a setting in uneven/config/run_config.py; tests/test_settings.py fails until then.
"""

import sys
from pathlib import Path
from typing import Any, get_args, get_origin

from uneven.config import RunConfig, Setting, names, settings_of

ROOT = Path(__file__).parent.parent
MODULE = ROOT / "uneven" / "api" / "settings.py"
PAGE = ROOT / "docs" / "settings.md"
BEGIN, END = "<!-- settings: made by tools/settings.py -->", "<!-- end of settings -->"
SETTINGS = list(settings_of(RunConfig).values())
LITERALS = {kind: name for name, kind in vars(names).items() if str(kind).startswith("typing.Literal")}

# The tables of the page, each with its settings in order; a setting that is in none goes into a last one.
GROUPS = {
    "Data and length": "batch_size epochs max_steps accumulate global_batch_size max_global_batch_size shuffle "
    "drop_last num_workers seed",
    "Devices and policy": "devices policy backend shares",
    "Memory": "strategy memory_shares redundancy bucket_mb memory_cap activations",
    "Optimizer and numbers": "precision compile max_grad_norm max_grad_value max_bad_steps scheduler_interval lr_scale "
    "sync_batchnorm check_loss",
    "Averaging params": "anchor max_anchor overhead_target divergence_threshold max_staleness optimizer_state verify",
    "Evaluation, checkpoints, files": "eval_every monitor monitor_mode save_every keep_last keep_best "
    "checkpoint_copies resume out overwrite replay progress",
    "Stopping and lost devices": "grace deadline on_fault min_ranks restarts skip",
}

HEAD = '''"""The settings as users type them: `Settings` for the keywords of `fit`, `SettingMethods` for the builder.

Written by tools/settings.py from the fields of RunConfig; edit those instead. Values are checked when the run starts.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from uneven.config.names import {literals}

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class Settings(TypedDict, total=False):
    """How to train; all have defaults but batch_size and epochs (or max_steps). See docs/settings.md."""

'''

METHODS = '''

class SettingMethods:
    """The builder's methods of single settings. Each notes its value and returns the builder."""

    def __init__(self) -> None:
        self._settings: Settings = {}

    def settings(self, **settings: "Unpack[Settings]") -> "Self":
        """Several settings at once, under the names of `fit`."""
        self._settings.update(settings)
        return self
'''


def type_text(kind: Any) -> str:
    """The type a user may pass, as Python source: any sequence where RunConfig holds a tuple, text for a path."""
    if kind in LITERALS:
        return LITERALS[kind]
    if kind is Path:
        return "str | Path"
    if get_origin(kind) is tuple:
        return f"Sequence[{get_args(kind)[0].__name__}]"
    if get_args(kind):
        return " | ".join(type_text(part) for part in get_args(kind))
    return "None" if kind is type(None) else str(kind.__name__)


def render_module() -> str:
    """The source of uneven/api/settings.py."""
    lines = [f"    {name}: {type_text(setting.type)}\n" for setting in SETTINGS for name in _names(setting)]
    methods = [_method(setting, name) for setting in SETTINGS for name in _names(setting)]
    words = {word for setting in SETTINGS for word in type_text(setting.type).split(" | ")}
    used = sorted(name for name in LITERALS.values() if name in words)
    literals = "(\n" + "".join(f"    {name},\n" for name in used) + ")"
    return HEAD.replace("{literals}", literals) + "".join(lines) + METHODS + "".join(methods)


def _names(setting: Setting) -> list[str]:
    return [setting.name, *([] if setting.alias is None else [setting.alias])]


def _method(setting: Setting, name: str) -> str:
    default = " = True" if setting.type is bool else ""
    about = setting.help if name == setting.name else f"The same as `{setting.name}`."
    return (
        f'\n    def {name}(self, {name}: {type_text(setting.type)}{default}) -> "Self":\n'
        f'        """{about}"""\n'
        f"        return self.settings({setting.name}={name})\n"
    )


def render_page(page: str) -> str:
    """The text of docs/settings.md with its tables regenerated."""
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    grouped = {name for names in GROUPS.values() for name in names.split()}
    others = " ".join(setting.name for setting in SETTINGS if setting.name not in grouped)
    by_name = {setting.name: setting for setting in SETTINGS}
    groups = {
        title: [by_name[name] for name in names.split()]
        for title, names in {**GROUPS, "Other settings": others}.items()
        if names
    }
    tables = [
        f"### {owner}\n\n| setting | default | meaning |\n|---|---|---|\n" + "".join(map(_row, members))
        for owner, members in groups.items()
    ]
    return before + BEGIN + "\n\n" + "\n".join(tables) + "\n" + END + after


def _row(setting: Setting) -> str:
    alias = "" if setting.alias is None else f" (`{setting.alias}`)"
    if setting.is_required:
        default = setting.none or "required"
    elif setting.default is None:
        default = f"`None` ({setting.none})"
    else:
        default = f"`{setting.default!r}`".replace("'", '"')
    allowed = ", ".join(f'`"{word}"`' for word in setting.choices)
    values = setting.allowed.split("one of ")[0] + allowed
    only = "" if setting.policies is None else f" Only with {' and '.join(setting.policies)}."
    is_plain = bool in setting.members or str in setting.members or Path in setting.members
    values = "" if is_plain else f" Allowed: {values}."
    return f"| `{setting.name}`{alias} | {default} | {setting.help}{only}{values} |\n"


def main(arguments: list[str]) -> int:
    wanted = {MODULE: render_module(), PAGE: render_page(PAGE.read_text())}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(f"{'differs' if arguments else 'written'}: {path.relative_to(ROOT)}")
        if not arguments:
            path.write_text(wanted[path])
    return int(bool(stale and arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
