"""Whether a document of JSON that somebody may have changed or damaged is what its reader needs."""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

# A test of one value; [shape] for a list of such; {name: shape} for an object, with "*" for all of its values.
Shape: TypeAlias = "Callable[[Any], bool] | list[Shape] | dict[str, Shape]"


def fits(value: Any, shape: Shape) -> bool:
    if isinstance(shape, list):
        return isinstance(value, list) and all(fits(one, shape[0]) for one in value)
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(
            all(fits(one, inner) for one in value.values()) if name == "*" else fits(value.get(name), inner)
            for name, inner in shape.items()
        )
    return shape(value)


def optional(shape: Shape) -> Shape:
    return lambda value: value is None or fits(value, shape)


def is_number(value: Any) -> bool:
    """Finite, and no truth value."""
    return is_figure(value) and math.isfinite(value)


def is_figure(value: Any) -> bool:
    """A number that may be NaN or infinite, as the loss of a run that has diverged."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    return isinstance(value, int)


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_object(value: Any) -> bool:
    return isinstance(value, dict)
