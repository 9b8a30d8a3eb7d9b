"""Options that hold one or several numbers, with commas between them."""

from uneven.errors import InputError


def numbers(option: str, text: str) -> tuple[float, ...]:
    """ "5,2" -> (5.0, 2.0); InputError with the option's name where an entry is no number."""
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError:
        raise InputError(f"{option} {text!r} must be numbers with commas between them, as in 5,2") from None
