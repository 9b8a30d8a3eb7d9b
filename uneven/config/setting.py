"""How a field of RunConfig describes itself as a setting, and the checks that follow from the description.

A field is written as `setting(default, "help", least=1)`; `settings_of(RunConfig)` reads the fields
back as `Setting` records. [Note: one list of settings] Everything else is made from these records: the flags of
`uneven run` (cli/run.py), the types and builder methods in api/settings.py, the table of docs/settings.md (both
written by tools/settings.py) and the checks of names, choices and ranges. tests/test_settings.py compares them.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from os import PathLike
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from uneven.errors import InputError

# Of `fit`, beside the settings.
ARGUMENTS = ("model", "optimizer", "step", "dataset", "scheduler", "evaluate", "collate_fn", "sampler", "batch_sampler")
_IN_OPTIMIZER = "it belongs to the optimizer: pass optimizer=lambda params: torch.optim.SGD(params, lr=0.1)"
# What other libraries call it, where no name of ours is near enough to be found.
OTHER_WORDS = {
    "lr": _IN_OPTIMIZER,
    "learning_rate": _IN_OPTIMIZER,
    "weight_decay": _IN_OPTIMIZER,
    "loss": "pass step=lambda model, batch: loss(model(batch[0]), batch[1])",
    "loss_fn": "pass step=lambda model, batch: loss_fn(model(batch[0]), batch[1])",
    "criterion": "pass step=lambda model, batch: criterion(model(batch[0]), batch[1])",
    "train_dataset": "pass dataset=...",
    "train_dataloaders": "pass dataset=...",
    "eval_dataset": "pass evaluate=(test_set, eval_step)",
    "output_dir": "pass out=...",
    "default_root_dir": "pass out=...",
    "per_device_train_batch_size": "pass batch_size=..., which is per device",
    "gradient_accumulation_steps": "pass accumulate=...",
    "accumulate_grad_batches": "pass accumulate=...",
    "gradient_clip_val": "pass max_grad_norm=...",
    "world_size": "the number of ranks follows from devices='cpu,cpu@0.4'",
    "accelerator": "pass devices=..., as in devices='cuda:0'",
    "fp16": "pass precision='fp16'",
    "bf16": "pass precision='bf16'",
}


def about(help: str, **more: Any) -> dict[str, Any]:
    """The metadata of a field: one plain sentence of help, and what cannot be read off its type, as in `Setting`."""
    return {"help": help, **more}


def setting(default: Any, help: str, **more: Any) -> Any:
    """A field with this default that is described by `about`."""
    return field(default=default, metadata=about(help, **more))


@dataclass(frozen=True)
class Setting:
    """One setting: a field of RunConfig with its type, default and description. Immutable."""

    name: str
    type: Any
    default: Any  # MISSING where it must be given
    help: str
    least: int | None = None  # the smallest whole number allowed; 0 allows the number 0.0, too
    most: int | None = None  # the largest one (a large one: of all bits 1)
    below: float | None = None  # the bound of a number, which is above 0
    policies: tuple[str, ...] | None = None  # those it belongs to; None: all
    why_not: str | None = None  # explains a refusal with another policy
    none: str | None = None  # what None means
    alias: str | None = None
    accepts: Callable[[Any], bool] | None = None  # narrows text down to what can be read
    allowed_text: str | None = None  # that in words

    @property
    def members(self) -> tuple[Any, ...]:
        """The types of a union, without None."""
        is_union = get_origin(self.type) in (Union, UnionType)  # Literal[...] | None is a Union, int | None a UnionType
        parts = get_args(self.type) if is_union else (self.type,)
        return tuple(part for part in parts if part is not type(None))

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that are allowed; empty where it is no choice."""
        return tuple(word for member in self.members if _is_literal(member) for word in get_args(member))

    @property
    def is_required(self) -> bool:
        return self.default is MISSING

    @property
    def takes_none(self) -> bool:
        """Whether None is a value of its own, and not only what was left out."""
        return self.default is not None and type(None) in get_args(self.type)

    @property
    def is_list(self) -> bool:
        """Whether it may be one value per device."""
        return any(_is_tuple(member) for member in self.members)

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def allowed(self) -> str:
        """What a value must be, in words."""
        if self.allowed_text is not None:
            return self.allowed_text
        phrases = []
        if int in self.members:
            most = "" if self.most is None else f" and {_at_most(self.most)}"
            phrases.append(f"a whole number of at least {self.least}{most}")
        if float in self.members:
            lowest = "of at least 0" if self.least == 0 else "above 0"
            phrases.append(f"a number {lowest}" + (f" and below {self.below:g}" if self.below is not None else ""))
        if bool in self.members:
            phrases.append("True or False")
        if self.choices:
            phrases.append(f"one of {', '.join(self.choices)}")
        if self.is_list:
            phrases.append(
                "one such number per device" if phrases else "numbers of at least 0, one per device, not all 0"
            )
        if self.takes_none:
            phrases.append("None")
        separator = ", or " if self.is_list else " or "
        return separator.join(phrases) or ("a path" if Path in self.members else "text, as in 'cuda:0,cpu'")

    def convert(self, value: Any) -> Any:
        """A value as the user wrote it -> as RunConfig holds it; one that cannot be converted is left to `check`."""
        if Path in self.members and isinstance(value, str | PathLike) and str(value):
            return Path(value).expanduser()
        if not self.is_list or isinstance(value, str) or not isinstance(value, Iterable):
            return value
        entries = tuple(value)
        if tuple[float, ...] in self.members:
            with suppress(TypeError, ValueError):  # a type of numpy's or torch's becomes a plain number
                return tuple(float(entry) for entry in entries)
        return entries

    def check(self, value: Any) -> None:
        """InputError with the allowed range where the value cannot be right, whatever the other settings are."""
        if value is None and type(None) in get_args(self.type):
            return
        is_read = self.accepts is None or self.accepts(value)
        if not is_read or not any(self._accepts(member, value) for member in self.members):
            raise InputError(f"{self.name}={value!r} must be {self.allowed}")

    def policy_conflict(self, value: Any, policy: str) -> str | None:
        """Why the setting is refused, where it is given and does not belong to the policy: it would be ignored."""
        allowed = (*(self.policies or ()), "auto")  # which chooses among the policies that all settings go with
        if self.policies is None or policy in allowed or value is None or value == self.default:
            return None
        names = self.policies
        owner = f"policy={names[0]!r}" if len(names) == 1 else f"the policies {' and '.join(names)}"
        reason = self.why_not or f"it belongs to {owner} and would be ignored; leave it out"
        return f"{self.name}={value!r} with policy={policy!r}: {reason}"

    def _accepts(self, member: Any, value: Any) -> bool:
        if _is_literal(member):
            return isinstance(value, str) and value in get_args(member)
        if member is int:
            return _is_whole(value) and value >= (self.least or 0) and (self.most is None or value <= self.most)
        if member is float:
            upper = float("inf") if self.below is None else self.below
            return _is_number(value) and 0 <= value < upper and (value > 0 or self.least == 0)
        if member == tuple[int, ...]:
            return isinstance(value, tuple) and value != () and all(self._accepts(int, entry) for entry in value)
        if member == tuple[float, ...]:
            is_plain = isinstance(value, tuple) and value != () and all(_is_number(entry) for entry in value)
            return is_plain and min(value) >= 0 and 0 < sum(value) < float("inf")
        return isinstance(value, member)


@cache
def settings_of(config: type) -> dict[str, Setting]:
    """The settings that a dataclass declares by `about(...)`, by name, in the order they are written in."""
    hints = get_type_hints(config)
    return {
        one.name: Setting(name=one.name, type=hints[one.name], default=one.default, **one.metadata)
        for one in fields(config)
    }


def check_names(given: Mapping[str, Any], known: Mapping[str, Setting]) -> None:
    """InputError for a name that is no setting, with the one that is meant."""
    for name in given:
        if name in known:
            continue
        if name in OTHER_WORDS:
            raise InputError(f"unknown setting {name!r}: {OTHER_WORDS[name]}")
        aliases = {setting.alias: setting.name for setting in known.values() if setting.alias is not None}
        close = difflib.get_close_matches(name, [*known, *aliases, *ARGUMENTS], n=1)
        meant = (
            f"did you mean {aliases.get(close[0], close[0])!r}?" if close else f"the settings are {', '.join(known)}"
        )
        raise InputError(f"unknown setting {name!r}; {meant}")


def _is_literal(member: Any) -> bool:
    return get_origin(member) is Literal


def _is_tuple(member: Any) -> bool:
    return get_origin(member) is tuple


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _at_most(number: int) -> str:
    return f"at most {number}" if number < 100 else f"below 2**{number.bit_length()}"
