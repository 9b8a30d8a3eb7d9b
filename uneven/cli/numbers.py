"""Numbers as they are typed: one, or several with commas between them."""

from uneven.errors import InputError


def numbers(option: str, text: str) -> tuple[float, ...]:
    """InputError where one of them is none."""
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError:
        raise InputError(f"{option} {text!r} must be numbers with commas between them, as in 5,2") from None
