"""`uneven simulate`: a policy's run on a cluster that is described in a file and need not exist."""

import math
import sys
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated

import typer

from uneven.cli.output import Json, new_table, print_json, print_whole
from uneven.config.sources import load_toml
from uneven.errors import InputError
from uneven.files import ABSENT
from uneven.format import format_count
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
    if curve is not None and page is not None:
        raise InputError("--page shows one cluster: leave out --curve")
    numbers = None if curve is None else _read_numbers(curve)
    clusters = [described] if numbers is None else [described.resized(number) for number in numbers]
    found = [(one, _simulate_one(one, job, policy, hours)) for one in clusters for policy in policies]
    results = [one for _, one in found]
    machines, speed = len(set(described.machines)), described.speed(job.batch_size)
    if as_json and curve is not None:
        print_json(Curve([row_of(one, len(many.ranks)) for many, one in found]))
    elif as_json:
        print_json(Simulation(title, len(described.ranks), machines, speed, [row_of(one) for one in results]))
    else:
        if curve is None:
            print(f"{title}: {len(described.ranks):,} ranks on {format_count(machines, 'machine')}\n")
        _print(found, has_ranks=curve is not None)
    if page is not None:
        from uneven.timeline.simulated_page import write_simulated_page

        write_simulated_page(page, title, described, results)
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
    same = {own.name: getattr(one, own.name) for own in fields(Row) if hasattr(one, own.name)}
    own = {"kinds": kinds_of(one), "time": {state: one.mean(state) for state in STATES}, "ranks": ranks}
    return Row(**{**same, **own})


def kinds_of(one: Simulated) -> list[KindOfDevice]:
    """Per kind of device: how many ranks were ever there, their part of all samples, and their time by state."""
    found = []
    for name in dict.fromkeys(one.kinds):
        ranks = [rank for rank, kind in enumerate(one.kinds) if kind == name]
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


def _print(found: list[tuple[Cluster, Simulated]], *, has_ranks: bool) -> None:
    names = [f"{len(many.ranks):>7,}  {one.policy:8}" if has_ranks else f"{one.policy:8}" for many, one in found]
    headings = ("policy", "s/epoch", "samples/s", "efficiency", "communication", "wait")
    table = new_table(*(["ranks"] if has_ranks else []), *headings, left=("policy",), pad_edge=False)
    for many, one in found:
        table.add_row(
            *([f"{len(many.ranks):,}"] if has_ranks else []),
            one.policy,
            f"{one.seconds_per_epoch:,.1f}" if math.isfinite(one.seconds_per_epoch) else "-",
            f"{one.samples_per_s:,.0f}",
            f"{one.efficiency:.3f}",
            *(f"{100 * one.mean(state):.1f} %" for state in ("communication", "wait")),
        )
    print_whole(table)
    print("\nWhat limits:", *(f"  {name}  {one.limits}" for name, (_, one) in zip(names, found, strict=True)), sep="\n")
    changed = [pair for pair in zip(names, found, strict=True) if pair[1][1].failures or pair[1][1].joins]
    if changed:
        print("\nLost and joined, and what was trained again:")
    for name, (_, one) in changed:
        print(f"  {name}  {one.failures} lost, {one.joins} joined, {one.trained_again:,} samples again")
