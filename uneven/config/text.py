"""Settings as text, as an option or an environment variable holds them -> their values. Pure: imports no torch."""

from typing import Any

from uneven.config.setting import Setting
from uneven.errors import InputError

WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def numbers(option: str, text: str) -> tuple[float, ...]:
    """ "5,2" -> (5.0, 2.0); InputError with the option's name where an entry is no number."""
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError:
        raise InputError(f"{option} {text!r} must be numbers with commas between them, as in 5,2") from None


def parse_text(setting: Setting, text: str, name: str) -> Any:
    """The value of a setting that was written as text; one that cannot be read stays text, for the setting's check.

    `name` is where it was written, as in --shares or UNEVEN_SHARES.
    """
    if setting.takes_none and text == "none":
        return None
    if bool in setting.members:
        return WORDS.get(text.lower(), text)
    if setting.is_list:
        entries = numbers(name, text)
        if int not in setting.members:
            return entries
        whole = tuple(int(entry) if entry.is_integer() else entry for entry in entries)
        return whole if len(whole) > 1 else whole[0]
    if int in setting.members and text.isdecimal():
        return int(text)
    return number_or_word(text) if float in setting.members else text


def number_or_word(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
