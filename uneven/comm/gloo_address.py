"""Where Gloo listens and connects: at the interface that is named, or at one address where that would not do.

Gloo takes the first address of GLOO_SOCKET_IFNAME's interface, and IPv4 comes first: beside a machine that has IPv6
alone it fails (`ss_family 10 vs 2`). Then launch/external/interface.py names the address here, and comm/group.py asks
for the backend's name.
"""

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

BACKEND = "gloo_at_address"
_address: list[str] = []


def use_gloo_address(address: str) -> None:
    """All groups that this process forms from now on have their Gloo connections at this numeric address."""
    _address[:] = [address]
    if BACKEND.upper() not in dist.Backend.__dict__:
        dist.Backend.register_backend(BACKEND, _make_backend, extended_api=True, devices=["cpu"])


def gloo_backend() -> str:
    """The name of the backend for host tensors."""
    return BACKEND if _address else "gloo"


def count_devices() -> int:
    """How many addresses a group of Gloo listens at."""
    return 1 if _address else len(os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))


def make_options(timeout: timedelta) -> Any:
    """Of a group that is formed without torch's default one, at the same address as that."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()  # Gloo's options have no public name that holds its devices
    if _address:
        options._devices = [gloo.create_device(hostname=_address[0])]
    elif names := os.environ.get("GLOO_SOCKET_IFNAME"):
        options._devices = [gloo.create_device(interface=name) for name in names.split(",")]
    else:
        options._devices = [gloo.create_default_device()]
    options._threads = 2 * len(options._devices)
    options._timeout = timeout
    return options


def _make_backend(asked: Any, options: Any) -> Any:
    del options
    gloo: Any = dist.ProcessGroupGloo
    return gloo(asked.store, asked.group_rank, asked.group_size, make_options(asked.timeout))
