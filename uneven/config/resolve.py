"""From the settings as a user wrote them to a checked RunConfig: names, aliases, and what the command line replaces."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from uneven.config.run_config import RunConfig
from uneven.config.setting import check_names, settings_of
from uneven.errors import InputError

_ALIASES = {setting.alias: name for name, setting in settings_of(RunConfig).items() if setting.alias is not None}


def check_settings(settings: Mapping[str, Any]) -> None:
    """Check an incomplete set of settings: InputError for an unknown name or an impossible value.

    `uneven run` calls this before it starts a rank; what depends on the script is checked in `resolve`.
    """
    known = settings_of(RunConfig)
    given = by_name(settings)
    check_names(given, known)
    for name, value in given.items():
        known[name].check(known[name].convert(value))


def by_name(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings under their own names; InputError where one is given under two names."""
    for alias, name in _ALIASES.items():
        if alias in settings and name in settings and settings[alias] != settings[name]:
            both = f"{name}={settings[name]!r} and {alias}={settings[alias]!r}"
            raise InputError(f"{both} are one setting under two names; pass {name} alone")
    return {_ALIASES.get(name, name): value for name, value in settings.items()}


def resolve(settings: Mapping[str, Any], overrides: Mapping[str, Any] = MappingProxyType({})) -> RunConfig:
    """Settings as the user wrote them -> a checked RunConfig; `overrides` (the command line) take precedence."""
    known = settings_of(RunConfig)
    given = {**by_name(settings), **by_name(overrides)}
    check_names(given, known)
    if given.get("max_steps") is not None and given.get("epochs") is None:
        known["max_steps"].check(given["max_steps"])
        given["epochs"] = given["max_steps"]  # more than enough: an epoch has at least one step; the axis ends them
    for name, setting in known.items():
        if setting.is_required and name not in given:
            other = ", or max_steps=..." if name == "epochs" else ""
            raise InputError(f"{name} is missing: pass {name}=...{other} (it has no default)")
    return RunConfig(**{name: known[name].convert(value) for name, value in given.items()})
