"""Values of a JSON file as those of a dataclass's fields: a wrong type is found here, not where it is used later."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

_T = TypeVar("_T")


def from_values(kind: type[_T], values: Mapping[str, Any]) -> _T:
    """An object of a dataclass; fields that it does not know are ignored, as a newer version may have written them.

    KeyError for a field that is missing, TypeError for a value that is not of the field's type.
    """
    hints = get_type_hints(kind)
    known: dict[str, Any] = {}
    for part in fields(kind):  # type: ignore[arg-type]
        if part.name in values:
            value = values[part.name]
            known[part.name] = tuple(value) if isinstance(value, list) else value
            if not _is_of(known[part.name], hints[part.name]):
                raise TypeError(f"{kind.__name__}.{part.name} must not be {value!r}")
        elif part.default is MISSING and part.default_factory is MISSING:
            raise KeyError(f"{kind.__name__}.{part.name} is missing")
    return kind(**known)


def _is_of(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotated type; of those that records have: no more is understood here."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(_is_of(value, option) for option in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if origin is tuple:  # of any length: tuple[int, ...]
        return isinstance(value, tuple) and all(_is_of(one, get_args(hint)[0]) for one in value)
    if hint is None or hint is NoneType:
        return value is None
    if hint in (int, float):  # JSON writes 4.0 as 4 where a program does; True is no number
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return isinstance(value, hint)
