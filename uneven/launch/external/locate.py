"""Find the store of ranks that an engine started, before Gloo or NCCL see an address: numeric, and seen to answer.

Called once per process by launch/external/assemble.py. Where the engine has no store, rank 0 serves it, on one address
of its machine alone. A name that leads to this machine's own loopback (Debian's 127.0.1.1) is then taken for what the
other machines know under it: this machine's address on the network.
"""

import errno
import socket
import sys
import time
from dataclasses import replace

from uneven.comm.store import TCPStore, open_store
from uneven.errors import InputError, MachineError
from uneven.hardware.addresses import is_loopback, is_numeric, is_v6, outward_address, resolve
from uneven.hardware.network import read_interfaces
from uneven.launch.environment import LaunchEnvironment

REACH_S = 300.0  # for rank 0, whose script may load its data first, or whose pod is still being scheduled
PATIENCE_S = 10.0  # then a rank says for whom it waits
ATTEMPT_S, PAUSE_S = 3.0, 0.1

_hosted: list[TCPStore] = []  # lives as long as the process: the other ranks need it to the end


def warn(line: str) -> None:
    print(f"uneven: {line}", file=sys.stderr, flush=True)


def locate_store(environment: LaunchEnvironment, limit_s: float = REACH_S) -> LaunchEnvironment:
    """The same with the numeric address of a store that answers. InputError or MachineError where there is none."""
    if environment.hosts_store:
        return replace(environment, host=_host(environment))
    begin, has_said = time.monotonic(), False
    while True:
        targets = store_addresses(environment)
        failures = []
        for address in targets:
            failure = _try(address, environment.port)
            if failure is None:
                return replace(environment, host=address)
            failures.append(f"{address}: {failure}")
        waited_s = time.monotonic() - begin
        if not targets and not (environment.is_kubernetes and waited_s < limit_s):
            raise InputError(_unknown(environment))
        if waited_s > limit_s:
            raise MachineError(
                f"rank {environment.rank} on {socket.gethostname()} finds no store at port {environment.port} "
                f"({environment.variable}; {'; '.join(failures)}): is rank 0 running, and does a firewall let this "
                "machine in? export MASTER_ADDR=ADDRESS-OF-RANK-0 where that is another one"
            )
        if waited_s > PATIENCE_S and not has_said:
            has_said = True
            where = "; ".join(failures) or "its name is not known yet"
            warn(f"rank {environment.rank} waits for rank 0's store, port {environment.port} ({where})")
        time.sleep(PAUSE_S)


def store_addresses(environment: LaunchEnvironment) -> tuple[str, ...]:
    """The numeric addresses at which the store may be; none where nobody knows its name."""
    addresses = resolve(environment.host) or (resolve(environment.fallback) if environment.fallback else ())
    if not addresses:
        # torchrun --standalone on a machine that does not know its own name: its store is here.
        return ("127.0.0.1",) if environment.is_on_one_machine else ()
    if not all(is_loopback(address) for address in addresses):
        return tuple(address for address in addresses if not is_loopback(address))
    if environment.has_store:
        # An agent's store listens on all interfaces, also of this machine; on another one it cannot be reached so.
        if environment.node not in (None, 0) and not environment.is_on_one_machine and not _is_agent_here(environment):
            raise InputError(
                f"{environment.variable} is {addresses[0]} on {socket.gethostname()}, which is this machine itself, "
                "but the store is on another one: use its address on the network, as in --master-addr 192.0.2.10"
            )
        return addresses
    if not _may_be_many(environment):
        return addresses
    outward = outward_address(environment.peers)
    return addresses if outward is None else (outward,)


def _is_agent_here(environment: LaunchEnvironment) -> bool:
    """Whether something answers: the c10d endpoint may be on any of the machines."""
    return any(_try(address, environment.port) is None for address in resolve(environment.host))


def _may_be_many(environment: LaunchEnvironment) -> bool:
    """Whether ranks may be on other machines, so that loopback would not do."""
    if environment.local_world_size is not None:
        return not environment.is_on_one_machine
    # Kubernetes' older operators tell the master pod 'localhost' and the others its name.
    return environment.is_kubernetes or not (is_numeric(environment.host) or environment.host == "localhost")


def _host(environment: LaunchEnvironment) -> str:
    """Serve the store in this process, which is rank 0's; returns its address."""
    targets = store_addresses(environment)
    if environment.is_kubernetes:
        # A service's address leads to this pod, which does not have it.
        targets = (*targets, *filter(None, [outward_address(environment.peers)]))
    if not targets:
        raise InputError(_unknown(environment))
    for address in targets:
        if _hosted or _serve(address, environment.port):
            return address
    own = [address for interface in read_interfaces() for address in interface.addresses if not is_loopback(address)]
    raise InputError(
        f"{environment.variable} is {targets[0]}, no address of {socket.gethostname()}, where rank 0 is: "
        f"export MASTER_ADDR={own[0] if own else '127.0.0.1'} for all ranks (here are: {', '.join(own) or 'none'})"
    )


def _serve(address: str, port: int) -> bool:
    """False where the address is not this machine's."""
    try:
        family = socket.AF_INET6 if is_v6(address) else socket.AF_INET
        _hosted.append(open_store(socket.create_server((address, port), family=family, backlog=1024))[0])
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return False
        raise InputError(
            f"MASTER_PORT={port}: another program has it on {socket.gethostname()} ({address}), where rank 0 serves "
            "the store; export another MASTER_PORT for all ranks"
        ) from error
    return True


def _try(address: str, port: int) -> str | None:
    """None if something listens there, else why not."""
    try:
        with socket.create_connection((address, port), ATTEMPT_S) as connection:
            # A port for outgoing connections may by chance be connected to itself.
            return None if connection.getsockname() != connection.getpeername() else "Connection refused"
    except OSError as error:
        return error.strerror or str(error)


def _unknown(environment: LaunchEnvironment) -> str:
    return (
        f"{environment.variable}: {environment.host!r} is no name that {socket.gethostname()} can resolve; export "
        "MASTER_ADDR=ADDRESS-OF-RANK-0 in numbers for all ranks (torchrun: --master-addr, or --local-addr with c10d), "
        "or add the name to /etc/hosts"
    )
