"""The verbs of the command line as one table, and the first screen that `uneven --help` makes of it.

Imports nothing but the standard library's cheapest, so that the first screen and the completion of a verb's name are
there at once; cli/app.py loads a verb's module when it is called. To add a verb, add a row: its `help` is how the first
line of the verb's docstring begins, up to a point, colon or comma (tests/cli/test_first_screen.py compares them).
"""

import os
from typing import NamedTuple

NAME = "uneven"
ABOUT = "Train one PyTorch model on devices of different speed: samples are divided by speed, bytes by memory."
EXIT_CODES = (
    "Exit codes of every verb: 0 done, 1 failed, 2 bad input, 3 this machine or cluster cannot, "
    "130 stopped by Ctrl-C, 143 by SIGTERM, and saved. "
    "Messages go to stderr; with --json stdout holds one JSON document, or nothing if there is no result."
)


class Verb(NamedTuple):
    """One verb: where its function, or the typer app of its own verbs, is, and its line of the first screen."""

    name: str
    place: str  # module:name
    help: str


# In the order in which one does them.
VERBS: dict[str, tuple[Verb, ...]] = {
    "Get ready": (
        Verb("setup", "uneven.cli.setup:setup", "Find the hardware, choose and install the torch that covers it"),
        Verb("torch", "uneven.cli.torch_builds:app", "Keep several torch builds side by side"),
        Verb("diagnose", "uneven.cli.diagnose:diagnose", "Report the system, GPUs, torch, what fits together"),
        Verb("devices", "uneven.cli.devices:devices", "List the devices of this machine"),
    ),
    "Begin": (
        Verb("demo", "uneven.cli.demo:demo", "Train LeNet on 10,000 real digits on a fast and a slow device"),
        Verb("init", "uneven.cli.init:init", "Make a project that trains at once"),
        Verb("plan", "uneven.cli.plan:plan", "Predict the speed of your script with every policy"),
        Verb("simulate", "uneven.cli.simulate:simulate", "Simulate training on a cluster"),
    ),
    "Train": (
        Verb("run", "uneven.cli.run:run", "Run a script that uses uneven, in one process per device"),
        Verb("join", "uneven.cli.join:join", "Take part in a run that another machine leads"),
        Verb("leave", "uneven.cli.leave:leave", "Take the ranks of this machine out of a run"),
        Verb("status", "uneven.cli.status:status", "Show your runs on this machine"),
        Verb("logs", "uneven.cli.logs:logs", "Print what the processes of a run have printed"),
        Verb("stop", "uneven.cli.stop:stop", "Stop a run, as Ctrl-C in its terminal does"),
        Verb("preflight", "uneven.cli.preflight:preflight", "Check everything that a run needs"),
        Verb("chaos", "uneven.cli.chaos:chaos", "Run a script and kill, stop or cut off its ranks"),
    ),
    "Results": (
        Verb("state", "uneven.cli.state:app", "Look into results and checkpoints, compare them, export the model"),
        Verb("data", "uneven.cli.data:app", "List the data sets and download them"),
        Verb("config", "uneven.cli.config:app", "Show where each setting of a run comes from, check a run.toml"),
        Verb("bench", "uneven.cli.bench:app", "Train the benchmark models and measure them"),
    ),
}


def all_verbs() -> dict[str, Verb]:
    return {verb.name: verb for group in VERBS.values() for verb in group}


def first_screen(has_color: bool = False) -> str:
    """What `uneven --help` prints: 80 columns wide, in one screen."""
    bold, plain = ("\033[1m", "\033[0m") if has_color else ("", "")
    what, _, how = ABOUT.partition(": ")
    width = max(len(name) for name in all_verbs()) + 2
    lines = [f"{what}:", f"{how}", ""]
    lines += [f"{bold}Usage:{plain} {NAME} VERB [OPTIONS] [ARGS]   ({NAME} VERB --help has examples)"]
    for heading, verbs in VERBS.items():
        lines += ["", f"{bold}{heading}{plain}"]
        lines += [f"  {bold}{verb.name:<{width}}{plain}{verb.help}" for verb in verbs]
    options = "--version prints the version, -h or --help this, --install-completion teaches your shell the tab key."
    return "\n".join([*lines, "", *_wrapped(options), *_wrapped(EXIT_CODES)])


def is_colored(stream: object) -> bool:
    isatty = getattr(stream, "isatty", lambda: False)
    return bool(isatty()) and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def _wrapped(text: str, width: int = 80) -> list[str]:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".lstrip()
    return lines
