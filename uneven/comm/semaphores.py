"""POSIX semaphores in memory that processes share: how ranks of one machine tell each other that bytes are there.

Used by comm/shared_ring.py. A post is a release and a successful wait an acquire, on Arm as on x86: what a rank wrote
before its post is what the other reads after its wait. A bare integer in a mapping would give this on x86 only. They
are those of the C library, called by ctypes, so nothing is compiled.
"""

import ctypes
import errno
import os
import time

BYTES = 128  # room for one: a sem_t has 32 bytes, and two in one cache line would slow each other down

# Held: calls that never block keep the interpreter's lock. Giving it up costs a busy process up to 5 ms to get it back.
_held = ctypes.PyDLL(None)
_released = ctypes.CDLL(None, use_errno=True)
_CLOCK = getattr(_released, "sem_clockwait", None)  # glibc 2.30; elsewhere the clock that may be set is used


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def is_available() -> bool:
    """Whether this C library has what is used here."""
    return all(hasattr(_released, name) for name in ("sem_init", "sem_post", "sem_trywait", "sem_timedwait"))


class Semaphore:
    """A semaphore at an address in a mapping; `create` it in one process before the others use it."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = ctypes.c_void_p(address)

    def create(self, value: int = 0) -> None:
        if _released.sem_init(self._address, 1, value):
            raise OSError(ctypes.get_errno(), "sem_init")

    def post(self) -> None:
        _held.sem_post(self._address)

    def try_wait(self) -> bool:
        return not _held.sem_trywait(self._address)

    def wait(self, seconds: float) -> bool:
        """Sleep until it was posted, for so long at most; False also after a signal, so that Python handles it."""
        if _CLOCK is not None:
            until = _deadline(time.clock_gettime(time.CLOCK_MONOTONIC) + seconds)
            failed = _CLOCK(self._address, time.CLOCK_MONOTONIC, ctypes.byref(until))
        else:
            failed = _released.sem_timedwait(self._address, ctypes.byref(_deadline(time.time() + seconds)))
        if not failed:
            return True
        number = ctypes.get_errno()
        if number not in (errno.EINTR, errno.ETIMEDOUT):
            raise OSError(number, f"sem_timedwait: {os.strerror(number)}")
        return False


def _deadline(seconds: float) -> _Timespec:
    whole = int(seconds)
    return _Timespec(whole, int((seconds - whole) * 1e9))
