"""The standard streams of a process that was started without some of them: by a daemon, or with `2>&-`. No torch."""

import os
import sys


def open_closed_streams() -> None:
    """Put /dev/null in the place of each that is closed; called before a process of ours, or a run, opens anything.

    The next file, socket or segment of memory would get the number of a closed one, and what a library prints would go
    there. And sys.stderr is None then: runs ended before they began, or lost their result at the end.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)  # ranks and loader processes have it, too
    os.close(descriptor)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115, for the life of the process
