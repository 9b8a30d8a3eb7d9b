"""Gloo of older releases of torch writes a line to stdout for every group it has connected: here it goes to stderr.

Used where groups are formed (comm/gloo.py, comm/group.py). Without it the line is in the middle of what a script prints
and breaks every `--json` (torch 2.8; 2.13 writes none).
"""

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.torch_version import TorchVersion

WRITES: bool = TorchVersion(torch.__version__) < "2.13"

_lock = threading.Lock()
_inside = 0  # threads that form a group
_stdout = -1  # what the descriptor 1 was


@contextmanager
def gloo_to_stderr() -> Iterator[None]:
    """Around the forming of a group: the descriptor is the process's, so the last of several threads puts it back."""
    if not WRITES or not _enter():
        yield
        return
    try:
        yield
    finally:
        _leave()


def _enter() -> bool:
    global _inside, _stdout
    with _lock:
        if _inside == 0:
            try:
                os.fstat(2)
                _stdout = os.dup(1)
            except OSError:  # a process without stdout, or without stderr
                return False
            os.dup2(2, 1)
        _inside += 1
        return True


def _leave() -> None:
    global _inside
    with _lock:
        _inside -= 1
        if _inside == 0:
            ctypes.CDLL(None).fflush(None)  # what C++ still holds back
            os.dup2(_stdout, 1)
            os.close(_stdout)
