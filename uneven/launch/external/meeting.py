"""How ranks that another launcher started find each other: the store, then all ranks, then how they speak.

`assemble` is called once per process by launch/context.py, when its first run asks who takes part, before Gloo or NCCL
see an address. Where the launcher has no store, rank 0 serves it, on one address of its machine alone. A name that
leads to this machine's own loopback (Debian's 127.0.1.1) is then taken for what the other machines know under it.

[Note: the attempt's name] An agent's store keeps the keys of earlier attempts, and launchers have no number of the
attempt that all machines share: torchrun counts restarts on each machine by itself. So every process brings a word of
its own, rank 0 proposes a name together with the words it has read, and only who finds its own word in a proposal
accepts it. When all have, it is the name; a word that was left by a process of the last attempt is replaced by its
successor's, and rank 0 proposes anew.
"""

import errno
import json
import socket
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace

from uneven.comm.store import Store, TCPStore, get_text, open_store
from uneven.errors import USER_ERRORS, InputError, MachineError, RankError
from uneven.hardware.network import is_loopback, is_numeric, is_v6, outward_address, read_interfaces, resolve
from uneven.launch.environment import LaunchEnvironment
from uneven.launch.external.interface import agree_on_interface
from uneven.launch.external.placement import Facts, Placement, read_facts

REACH_S = 300.0  # for rank 0, whose script may load its data first, or whose pod is still being scheduled
RENDEZVOUS_S = 1800.0  # another rank may still load its data before it trains
PATIENCE_S = 10.0  # then a rank says for whom it waits
ATTEMPT_S, PAUSE_S = 3.0, 0.1
LOOK_S = 0.02  # at the store
REFUSED_KEY = "refused"

_hosted: list[TCPStore] = []  # lives as long as the process: the other ranks need it to the end


def assemble(environment: LaunchEnvironment) -> tuple[LaunchEnvironment, Placement, list[str]]:
    """(the environment with its numeric address and the keys of this attempt, who is where, lines for the user)."""
    rank, size = environment.rank, environment.world_size
    if size == 1:
        return environment, Placement((read_facts(replace(environment, host="")),)), []
    environment = locate_store(environment)
    name, facts = rendezvous(environment.connect("meeting"), rank, size, read_facts(environment), warn)
    environment = replace(environment, prefix=f"{environment.prefix}{name}/")
    placement = Placement(facts)
    choice, lines = agree_on_interface(environment.connect("interface"), rank, placement)
    return replace(environment, address=choice.address, doubt=choice.doubt), placement, lines


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


def rendezvous(
    store: Store,
    rank: int,
    size: int,
    facts: Facts,
    say: Callable[[str], None],
    limit_s: float = RENDEZVOUS_S,
) -> tuple[str, tuple[Facts, ...]]:
    """([Note: the attempt's name], the facts of all ranks in rank order), the same on all ranks."""
    own = json.dumps({"word": uuid.uuid4().hex, "facts": facts})
    store.set(_hello(rank), own)
    patience = _Patience(rank, size, limit_s, say)
    name, words = (_propose if rank == 0 else _accept)(store, rank, size, own, patience)
    return name, tuple(json.loads(text)["facts"] for text in words)


class _Patience:
    """Between two looks at the store: says once for whom it waits, and gives up after the limit."""

    def __init__(self, rank: int, size: int, limit_s: float, say: Callable[[str], None]) -> None:
        self._rank = rank
        self._size = size
        self._limit_s = limit_s
        self._say: Callable[[str], None] | None = say
        self._begin_s = time.monotonic()

    def wait(self, missing: Sequence[int]) -> None:
        waited_s = time.monotonic() - self._begin_s
        names = ", ".join(str(rank) for rank in missing) or "none"
        if waited_s > self._limit_s:
            raise MachineError(
                f"rank {self._rank} has waited {waited_s:.0f} s for the other {self._size - 1} ranks; "
                f"not heard of: {names}; look at the output of those, and start all of them again"
            )
        if waited_s > PATIENCE_S and missing and self._say is not None:
            self._say(f"rank {self._rank} waits for ranks {names} of {self._size}")
            self._say = None
        time.sleep(LOOK_S)


def _hello(rank: int) -> str:
    return f"hello/{rank}"


def _propose(store: Store, rank: int, size: int, own: str, patience: _Patience) -> tuple[str, list[str]]:
    assert rank == 0, "one rank proposes"
    name, proposed = "", list[str]()
    while True:
        missing = [other for other in range(1, size) if not store.check([_hello(other)])]
        if not missing:
            words = [own, *(store.get(_hello(other)).decode() for other in range(1, size))]
            if words != proposed:
                name, proposed = uuid.uuid4().hex[:12], words
                store.set("proposal", json.dumps([name, words]))
            missing = [other for other in range(1, size) if not store.check([f"accept/{name}/{other}"])]
        if proposed and not missing:
            store.set(f"go/{name}", "1")
            return name, proposed
        patience.wait(missing)


def _accept(store: Store, rank: int, size: int, own: str, patience: _Patience) -> tuple[str, list[str]]:
    accepted = ""
    while True:
        if (text := get_text(store, "proposal")) is not None:
            name, words = json.loads(text)
            if len(words) == size and words[rank] == own:
                if name != accepted:
                    store.set(f"accept/{name}/{rank}", "1")
                    accepted = name
                if store.check([f"go/{name}"]):
                    return name, words
        patience.wait([] if accepted else [0])


def await_all(store: Store, rank: int, size: int, refusals: Store | None = None) -> None:
    """Wait until every rank has passed its checks. InputError or MachineError with the words of one that has not.

    `refusals` is where those are written, if not to the same keys.
    """
    store.set(f"ready/{rank}", "1")
    keys = [f"ready/{other}" for other in range(size)]
    while not store.check(keys):
        if (text := get_text(refusals or store, REFUSED_KEY)) is not None:
            told = json.loads(text)
            raise USER_ERRORS.get(told["kind"], RankError)(told["message"])
        time.sleep(LOOK_S)


def tell_refusal(store: Store, rank: int, host: str, error: BaseException) -> None:
    """This rank will not come: its checks have failed."""
    kind = next((name for name, kind in USER_ERRORS.items() if isinstance(error, kind)), "other")
    message = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
    store.set(REFUSED_KEY, json.dumps({"kind": kind, "message": f"rank {rank} on {host}: {message}"}))
