"""Gloo at one address of this machine, where the interface alone would not do.

Gloo takes the first address of GLOO_SOCKET_IFNAME's interface, and IPv4 comes first: beside a machine that has IPv6
alone it fails (`ss_family 10 vs 2`). Then launch/interface.py names the address here, and comm/group.py asks for the
backend's name.
"""

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


def _make_backend(asked: Any, options: Any) -> Any:
    del options
    gloo: Any = dist.ProcessGroupGloo
    ours = gloo._Options()  # Gloo's options have no public name that holds its devices
    ours._devices = [gloo.create_device(hostname=_address[0])]
    ours._threads = 2
    ours._timeout = asked.timeout
    return gloo(asked.store, asked.group_rank, asked.group_size, ours)
