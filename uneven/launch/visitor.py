"""A user's script up to where it would train: `uneven config show` looks at its settings, `uneven plan` at its task.

The script runs as it is; `fit`, `Ddp.builder` and `Ddp.setup` show what they were given to the visitor of the process
context, which leaves the script there.
"""

from collections.abc import Mapping
from typing import Any

from uneven.config import RunConfig, Task

WRAPPED = "Ddp.wrap"  # what a visitor has found where the script trains by hand


class Visitor:
    """Of a script that is simply run: it looks at nothing."""

    def see_settings(self, settings: Mapping[str, Any]) -> None:
        """What the script passes, before it is checked."""

    def see_run(self, task: Task, config: RunConfig) -> None:
        """What the script is about to train."""

    def see_wrap(self) -> None:
        """The script is about to train a model by hand: uneven sees no task of it."""


class LeftScript(BaseException):
    """Leaves a script with what was looked for. No Exception: a script may catch those."""

    def __init__(self, found: Any) -> None:
        super().__init__("what was looked for in the script is found")
        self.found = found


class _LeavesWrap(Visitor):
    def see_wrap(self) -> None:
        raise LeftScript(WRAPPED)


class SettingsVisitor(_LeavesWrap):
    def see_settings(self, settings: Mapping[str, Any]) -> None:
        raise LeftScript(dict(settings))


class RunVisitor(_LeavesWrap):
    def see_run(self, task: Task, config: RunConfig) -> None:
        raise LeftScript((task, config))
