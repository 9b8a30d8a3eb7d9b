"""`uneven simulate`: a policy's run on a cluster that is described in a file and need not exist."""

import math
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer

from uneven.cli.output import Json, new_table, print_json, print_whole
from uneven.config.sources import load_toml
from uneven.errors import InputError
from uneven.files import ABSENT
from uneven.simulate.cluster import POLICIES, Cluster, Job, Policy
from uneven.simulate.scenario import read_scenario
from uneven.simulate.simulation import Simulated
from uneven.simulate.simulation import simulate as simulate_policy
from uneven.simulate.tally import STATES

MANY = 50  # ranks from which on a line says what is being simulated


@dataclass(frozen=True)
class KindOfDevice:
    """All ranks with one kind of device."""

    name: str
    count: int  # of ranks that were ever there
    share: float  # of all samples
    time: dict[str, float]  # the fraction by state


@dataclass(frozen=True)
class Row:
    """One policy on one cluster."""

    policy: str
    seconds: float
    seconds_per_epoch: float
    samples: int
    samples_per_s: float
    efficiency: float
    rounds: int
    time: dict[str, float]  # of all ranks, the fraction by state
    kinds: list[KindOfDevice]
    limits: str
    failures: int
    joins: int
    trained_again: int
    counts: tuple[int, ...]  # samples per step, or slots per window, of each rank
    shares: tuple[float, ...]
    over_time: tuple[tuple[float, float], ...]
    ranks: int | None = field(default=None, metadata=ABSENT)  # with --curve


@dataclass(frozen=True)
class Simulation:
    """What --json prints; docs/simulate.md describes it."""

    title: str
    ranks: int
    machines: int
    samples_per_s_alone: float
    results: list[Row]


@dataclass(frozen=True)
class Curve:
    """What --curve --json prints."""

    points: list[Row]


def simulate(
    cluster: Annotated[Path, typer.Argument(help="A TOML file that describes the cluster and the job.")],
    policy: Annotated[
        str, typer.Option(help="equal (plain DDP), sync, balanced, cadence, async; several with commas, or all.")
    ] = "all",
    hours: Annotated[float, typer.Option(help="At most so many simulated hours.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="In place of the file's.", show_default="the file's")] = None,
    curve: Annotated[
        str | None,
        typer.Option(help="The same mix of devices with so many ranks each, as in 10,100,1000.", show_default="none"),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(help="Write a page: lanes, efficiency over time, what limits; as in out.html.", show_default="no"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Simulate training on a cluster: time per epoch, efficiency and what limits it, for every policy.

    The same controllers as in real runs decide about shares, windows and rounds, on a simulated clock. Devices have a
    fixed cost and jitter, links a rate and a delay; ranks may fail, join and slow down. docs/simulate.md has the keys
    of the file, the formulas, and what is left out. The same file and seed give the same numbers on every machine.

    Examples:

      uneven simulate examples/clusters/two_gpus.toml

      uneven simulate examples/clusters/thousand.toml --policy async --hours 0.1 --page simulated.html

      uneven simulate examples/clusters/eight_gpus.toml --curve 8,64,512 --policy balanced,async
    """
    title, described, job = read_file(cluster, seed)
    policies = read_policies(policy)
    if page is not None:
        _check_page(page)
    if curve is not None:
        if page is not None:
            raise InputError("--page shows one cluster: leave out --curve")
        _show_curve(described, job, policies, _read_numbers(curve), hours, as_json)
        return
    found = [_simulate_one(described, job, one, hours) for one in policies]
    if as_json:
        machines, speed = len(set(described.machines)), described.speed(job.batch_size)
        print_json(Simulation(title, len(described.ranks), machines, speed, [row_of(one) for one in found]))
    else:
        _print_table(title, described, found)
    if page is not None:
        from uneven.timeline.simulated_page import write_simulated_page

        write_simulated_page(page, title, described, found)
        print(f"wrote {page}", file=sys.stderr)


def read_file(path: Path, seed: int | None = None) -> tuple[str, Cluster, Job]:
    """The title, cluster and job of a file."""
    table = load_toml(path)
    described, job = read_scenario(table, str(path))
    return table.get("title", path.stem), described if seed is None else replace(described, seed=seed), job


def read_policies(text: str) -> list[Policy]:
    """ "sync,async" -> those two; "all" -> every one."""
    names = list(POLICIES) if text == "all" else text.split(",")
    for name in names:
        if name not in POLICIES:
            raise InputError(f"--policy {name!r} is not one of {', '.join(POLICIES)}, all")
    return [one for one in POLICIES if one in names]


def row_of(one: Simulated, ranks: int | None = None) -> Row:
    return Row(
        policy=one.policy,
        seconds=one.seconds,
        seconds_per_epoch=one.seconds_per_epoch,
        samples=one.samples,
        samples_per_s=one.samples_per_s,
        efficiency=one.efficiency,
        rounds=one.rounds,
        time={state: one.mean(state) for state in STATES},
        kinds=kinds_of(one),
        limits=one.limits,
        failures=one.failures,
        joins=one.joins,
        trained_again=one.trained_again,
        counts=one.counts,
        shares=one.shares,
        over_time=one.over_time,
        ranks=ranks,
    )


def kinds_of(one: Simulated) -> list[KindOfDevice]:
    """Per kind of device: how many ranks were ever there, their part of all samples, and their time by state."""
    places: dict[str, list[int]] = {}
    for rank, name in enumerate(one.kinds):
        places.setdefault(name, []).append(rank)
    found = []
    for name, ranks in places.items():
        share, time = math.fsum(one.shares[rank] for rank in ranks), {state: one.mean(state, ranks) for state in STATES}
        found.append(KindOfDevice(name, len(ranks), share, time))
    return found


def _check_page(page: Path) -> None:
    """InputError before anything is simulated, which may take a while, where no page could be written."""
    if page.is_dir():
        raise InputError(f"--page {page} is a folder; name a file, as in --page {page / 'simulated.html'}")
    if not page.parent.is_dir():
        raise InputError(f"--page {page}: there is no folder {page.parent}; make it, or name another one")


def _simulate_one(cluster: Cluster, job: Job, policy: Policy, hours: float) -> Simulated:
    if not hours > 0.0:
        raise InputError(f"--hours {hours:g} must be above 0")
    if len(cluster.ranks) >= MANY:
        print(f"simulating {policy} on {len(cluster.ranks):,} ranks ...", file=sys.stderr)
    return simulate_policy(cluster, job, policy, hours)


def _read_numbers(text: str) -> list[int]:
    try:
        numbers = sorted({int(number) for number in text.split(",")})
    except ValueError:
        raise InputError(f"--curve {text!r} must be numbers of ranks with commas between them, as in 8,64") from None
    if numbers[0] < 1 or numbers[-1] > 100_000:
        raise InputError(f"--curve {text!r}: numbers of ranks must be between 1 and 100,000")
    return numbers


def _show_curve(
    cluster: Cluster, job: Job, policies: list[Policy], numbers: list[int], hours: float, as_json: bool
) -> None:
    rows = []
    for ranks in numbers:
        many = cluster.resized(ranks)
        rows += [(ranks, _simulate_one(many, job, policy, hours)) for policy in policies]
    if as_json:
        print_json(Curve([row_of(one, ranks) for ranks, one in rows]))
        return
    headings = ("ranks", "policy", "samples/s", "efficiency", "communication", "wait", "settling")
    table = new_table(*headings, left=("policy",), pad_edge=False)
    for ranks, one in rows:
        shown = [_percent(one, state) for state in ("communication", "wait", "settling")]
        table.add_row(f"{ranks:,}", one.policy, f"{one.samples_per_s:,.0f}", f"{one.efficiency:.3f}", *shown)
    print_whole(table)
    print("\nWhat limits:")
    for ranks, one in rows:
        print(f"  {ranks:>7,}  {one.policy:8}  {one.limits}")


def _print_table(title: str, cluster: Cluster, found: list[Simulated]) -> None:
    machines = len(set(cluster.machines))
    print(f"{title}: {len(cluster.ranks):,} ranks on {machines:,} machine{'s' if machines > 1 else ''}\n")
    headings = ("policy", "s/epoch", "samples/s", "efficiency", "communication", "wait")
    table = new_table(*headings, left=("policy",), pad_edge=False)
    for one in found:
        table.add_row(
            one.policy,
            f"{one.seconds_per_epoch:,.1f}" if math.isfinite(one.seconds_per_epoch) else "-",
            f"{one.samples_per_s:,.0f}",
            f"{one.efficiency:.3f}",
            _percent(one, "communication"),
            _percent(one, "wait"),
        )
    print_whole(table)
    print("\nWhat limits:")
    for one in found:
        print(f"  {one.policy:8}  {one.limits}")
    if any(one.failures or one.joins for one in found):
        print("\nLost and joined, and what was trained again:")
    for one in found:
        if one.failures or one.joins:
            print(f"  {one.policy:8}  {one.failures} lost, {one.joins} joined, {one.trained_again:,} samples again")


def _percent(one: Simulated, state: str) -> str:
    return f"{100 * one.mean(state):.1f} %"
