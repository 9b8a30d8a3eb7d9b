"""The roster: which device each rank has, and on which machine it is. All ranks of a run hold the same one."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from uneven.hardware.device import Device, parse_devices


@dataclass(frozen=True)
class Roster:
    """One entry per rank, in rank order: `machines` numbers the machines from 0 in the order of their first rank.

    `hosts` holds one name per machine, for messages; two machines may have the same one.
    """

    devices: tuple[Device, ...]
    machines: tuple[int, ...]
    hosts: tuple[str, ...] = ("localhost",)

    def __post_init__(self) -> None:
        assert len(self.devices) == len(self.machines), "one machine per rank"
        assert tuple(dict.fromkeys(self.machines)) == tuple(range(len(self.hosts))), "numbered by their first rank"

    @classmethod
    def on_one_machine(cls, devices: Sequence[Device]) -> "Roster":
        return cls(tuple(devices), (0,) * len(devices), ("localhost",))

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Roster":
        """Of `to_json`, or of more that has its keys."""
        return cls(parse_devices(found["devices"]), tuple(found["machines"]), tuple(found["hosts"]))

    def to_json(self) -> dict[str, list[Any]]:
        devices = [str(device) for device in self.devices]
        return {"devices": devices, "machines": list(self.machines), "hosts": list(self.hosts)}

    @property
    def is_one_machine(self) -> bool:
        return len(self.hosts) == 1

    def ranks_of(self, machine: int) -> tuple[int, ...]:
        """The ranks of a machine; the first of them speaks for it where one does."""
        return tuple(rank for rank, place in enumerate(self.machines) if place == machine)

    def local_ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks on the machine of this rank, itself included."""
        return self.ranks_of(self.machines[rank])

    def host(self, rank: int) -> str:
        return self.hosts[self.machines[rank]]

    def with_rank(self, device: Device, host: str) -> "Roster":
        """One more rank, the last one: on the machine of this name, or on a new one."""
        hosts = self.hosts if host in self.hosts else (*self.hosts, host)
        return Roster((*self.devices, device), (*self.machines, hosts.index(host)), hosts)

    def without(self, lost: Collection[int]) -> "Roster":
        """The other ranks in their order, with their machines numbered anew."""
        ranks = [rank for rank in range(len(self.devices)) if rank not in lost]
        numbers = tuple(dict.fromkeys(self.machines[rank] for rank in ranks))
        return Roster(
            tuple(self.devices[rank] for rank in ranks),
            tuple(numbers.index(self.machines[rank]) for rank in ranks),
            tuple(self.hosts[number] for number in numbers),
        )
