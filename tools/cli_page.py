"""Write docs/cli.md: every verb of the command line with its arguments and options, read from the commands themselves.

    python tools/cli_page.py docs/cli.md

The page is made from the objects that print `--help`, so it does not depend on the width of a terminal.
tests/test_cli_page.py fails if the committed page differs from the output of this script.
"""

import re
import sys
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from typing import Any

from typer.main import get_command

from uneven.cli.main import app

WIDTH = 120
HEAD = """# Command line

All verbs of `uneven`. `uneven VERB --help` prints the same; `tools/cli_page.py` makes this page from it.

## Exit codes

Every verb ends with one of these ([Settings](settings.md#exit-codes) says what is printed):

| code | meaning |
|---|---|
| 0 | done |
| 1 | failed: a rank, the script, a benchmark's run or a check; `uneven state diff` found a difference |
| 2 | bad input: an option, a setting, a file or a device that does not exist; the message names it and the fix |
| 3 | this machine or cluster cannot: no torch, driver, disk space or data set; `uneven diagnose` found a problem |
| 130 | stopped by Ctrl-C; a run has saved its state first |
| 143 | stopped by SIGTERM; a run has saved its state first |
"""


def make_page() -> str:
    return HEAD + "".join(_section(path, command) for path, command in _verbs(("uneven",), get_command(app)))


def _verbs(path: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        if not child.hidden:
            yield from _verbs((*path, name), child)


def _section(path: tuple[str, ...], command: Any) -> str:
    """The section of one command: its help, examples, arguments (in capitals) and options."""
    prose, examples = _split_help(command.help or "")
    parts = [f"\n## {' '.join(path)}\n\n{prose}\n"]
    if examples:
        parts.append("\n```sh\n" + "\n".join(examples) + "\n```\n")
    if children := getattr(command, "commands", None):
        parts.append("\n" + _wrap("Verbs: " + ", ".join(f"`{name}`" for name in children)) + ".\n")
    rows = _rows(command)
    shared, rest = _shared_with_run(path, rows)
    if rows := [row for row in rows if row not in shared]:
        parts.append("\n| option | default | meaning |\n|---|---|---|\n" + "".join(rows))
    return "".join([*parts, rest])


def _rows(command: Any) -> list[str]:
    return [_row(param) for param in command.params if not param.hidden and "completion" not in param.name]


def _shared_with_run(path: tuple[str, ...], rows: list[str]) -> tuple[set[str], str]:
    """The rows that a verb has from `uneven run`, where it has most of them, and the sentence that stands for them."""
    of_run = _rows(get_command(app).commands["run"])  # type: ignore[attr-defined]
    shared = {row for row in of_run if row in rows}
    if path == ("uneven", "run") or len(shared) < 20:
        return set(), ""
    own = {row.split(" | ")[0] for row in rows}
    missing = [row.split(" | ")[0].strip("| ") for row in of_run if row.split(" | ")[0] not in own]
    excepted = f", except {', '.join(missing)}" if missing else ""
    return shared, "\n" + _wrap(f"It also takes the options of [uneven run](#uneven-run){excepted}.") + "\n"


def _split_help(text: str) -> tuple[str, list[str]]:
    """The wrapped prose of a docstring, and its examples as commands; text after three spaces becomes a comment."""
    prose, examples = [], []
    for paragraph in cleandoc(text).split("\n\n"):
        words = re.sub(r"^Example: |Examples?:$", "", paragraph.strip()).strip()
        if words.startswith("uneven "):
            command, _, remark = " ".join(words.split("\n")).partition("   ")
            examples.append(" ".join(command.split()) + (f"  # {remark.strip()}" if remark else ""))
        elif words:
            prose.append(_wrap(words))
    return "\n\n".join(prose), examples


def _wrap(text: str) -> str:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > WIDTH:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def _row(param: Any) -> str:
    is_option = param.param_type_name == "option"
    flags = [*param.opts, *param.secondary_opts] if is_option else [param.name.upper()]
    names = ", ".join(f"`{flag}`" for flag in flags)
    default = "required" if param.required else _default(param)
    cells = [cell.replace("|", "\\|") for cell in (names, default, _help(param))]
    return f"| {' | '.join(cells)} |\n"


def _help(param: Any) -> str:
    return (getattr(param, "help", None) or "").replace("\\[", "[")  # which is how rich takes a bracket as it is


def _default(param: Any) -> str:
    is_unset = param.default is None or callable(param.default) or type(param.default).__name__ == "Sentinel"
    if is_unset or getattr(param, "is_flag", False) or param.default in ("", ()):
        return ""
    return f"`{param.default}`"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(make_page())
