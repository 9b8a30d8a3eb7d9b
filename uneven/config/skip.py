"""The checks between machines that a run may be told to leave out, by name. Pure: imports no torch."""

from typing import Any

from uneven.config.setting import about

# Models are always compared: a collective over tensors of other shapes corrupts data or hangs.
SKIPPABLE = ("uneven", "python", "torch", "nccl", "code", "dtype", "clock", "links", "data")


def read_skip(text: str | None) -> tuple[str, ...]:
    """'data, clock' -> ('data', 'clock')."""
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())


def about_skip() -> dict[str, Any]:
    """The metadata of the setting."""

    def accepts(value: Any) -> bool:
        words = read_skip(value) if isinstance(value, str) else ()
        return bool(words) and set(words) <= set(SKIPPABLE)

    return about(
        "Checks between machines to leave out, as in data or data,clock; docs/preflight.md lists them.",
        accepts=accepts,
        allowed=f"one or more of {', '.join(SKIPPABLE)}, separated by commas",
        default="all checks are made",
    )
