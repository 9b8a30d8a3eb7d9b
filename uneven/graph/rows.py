"""Rows of a batch: what goes with some of its samples."""

from typing import Any

from torch import Tensor

from uneven.errors import InputError


def per_sample(extra: Any, samples: int, verb: str) -> bool:
    """Whether a further input has a row for every sample: any tensor with dimensions must; others go whole."""
    if not isinstance(extra, Tensor) or extra.dim() == 0:
        return False
    if len(extra) != samples:
        raise InputError(
            f"{verb}: a further input of shape {tuple(extra.shape)} for {samples} samples: it must have a row for "
            "each, and what is the same for all belongs into the part"
        )
    return True


def rows_of(extra: tuple[Any, ...], mine: Tensor, samples: int, verb: str) -> tuple[Any, ...]:
    """The further inputs of these samples alone."""
    return tuple(one[mine] if per_sample(one, samples, verb) else one for one in extra)
