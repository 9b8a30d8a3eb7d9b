"""Values that the shell offers at a tab: choices, devices, runs. Given to typer's options as `autocompletion=`;
`uneven --install-completion` is typer's.

They run at every press of the key, so they load no torch, take a moment, and offer nothing where something is wrong.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress

Complete = Callable[[str], list[str]]

# Names that are spelled out here because the modules they belong to load torch; tests/cli/test_completion.py compares.
MODELS = (
    *("logistic", "mlp", "lenet", "conv-ae", "char-rnn", "gpt-nano", "resnet-20", "resnet-graph"),
    *("gpt2", "gpt-25m", "resnet-18", "resnet-50", "vit-b16"),
)


def one_of(words: Iterable[str]) -> Complete:
    """Completes to one of the words."""
    known = tuple(words)

    def complete(incomplete: str) -> list[str]:
        return [word for word in known if word.startswith(incomplete)]

    return complete


def devices(incomplete: str) -> list[str]:
    """The devices of this machine, in a list with commas between; cpu and a slowed one may be repeated."""
    before, comma, last = incomplete.rpartition(",")
    taken = before.split(",")
    words = [] if comma else ["auto"]
    words += [name for name in (f"cuda:{index}" for index in _gpus()) if name not in taken]
    return [f"{before}{comma}{word}" for word in (*words, "cpu", "cpu@0.4") if word.startswith(last)]


def _gpus() -> list[int]:
    with suppress(Exception):
        from uneven.hardware.gpus import read_gpus

        return [gpu.index for gpu in read_gpus().gpus]
    return []


def live_runs(incomplete: str) -> list[str]:
    """The runs of this user on this machine, by their ids."""
    with suppress(Exception):
        from uneven.launch.control import known_runs

        return [run.id for run in known_runs.live_runs() if run.id.startswith(incomplete)]
    return []


def all_runs(incomplete: str) -> list[str]:
    """The same, and those that have ended."""
    with suppress(Exception):
        from uneven.launch.control import known_runs

        return [run.id for run in known_runs.known_runs() if run.id.startswith(incomplete)]
    return []
