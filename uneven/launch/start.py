"""`uneven run script.py`: the script on one process per device, under the launcher's watch.

With one device there is nothing to start: the script runs in this process (unless it is a slice of a GPU).
"""

import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from uneven.config import check_settings
from uneven.errors import InputError, StoppedError
from uneven.hardware.device import Device, needs_ranks, parse_devices
from uneven.hardware.preflight import check_device, refuse_unsupported, usable_devices
from uneven.launch.script import execute
from uneven.results.progress import Reporter


def run_script(script: Path, args: Sequence[str], settings: Mapping[str, Any]) -> None:
    """Settings stand above those in the script; 'devices' says where it runs. KeyboardInterrupt after Ctrl-C."""
    refuse_unsupported()
    if not script.is_file():
        raise InputError(f"script {str(script)!r}: there is no such file; type: uneven run [settings] script.py")
    check_settings(settings)  # before any rank starts; the ranks check them again with the script's own
    names = settings.get("devices", "auto")
    devices = tuple(usable_devices()) if names == "auto" else parse_devices(names)
    for device in devices:
        check_device(device)
    if not needs_ranks(devices):
        from uneven.launch.context import set_solo_settings  # imports torch

        set_solo_settings(settings)
        execute(script, list(args))
        return
    run_on_ranks(script, args, devices, Reporter("lines"), settings)


def run_on_ranks(
    script: Path,
    args: Sequence[str],
    devices: tuple[Device, ...],
    reporter: Reporter,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """The script on one process per device, a single one included; `reporter` is for what the launcher has to say.

    Ctrl-C asks the ranks to stop, a second one ends them; KeyboardInterrupt either way.
    """
    from uneven.launch.launcher import run_ranks

    stop = threading.Event()

    def asked(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            signal.default_int_handler(number, frame)
        stop.set()

    before = signal.signal(signal.SIGINT, asked)
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in (settings or {}).items()}
    order = {"path": str(script.resolve()), "args": list(args), "settings": plain}
    try:
        run_ranks(None, devices, stop, reporter, lambda _: None, script=order)
    except StoppedError as error:
        raise KeyboardInterrupt from error
    finally:
        signal.signal(signal.SIGINT, before)
    if stop.is_set():
        raise KeyboardInterrupt
