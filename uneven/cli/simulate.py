"""`uneven simulate`: a policy's run on a cluster that is described in a file and need not exist."""

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from uneven.cli.tables import print_whole
from uneven.errors import InputError

if TYPE_CHECKING:
    from uneven.simulate.cluster import Cluster, Job, Policy
    from uneven.simulate.simulation import Simulated

MANY = 50  # ranks from which on a line says what is being simulated


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
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document; messages go to stderr.")] = False,
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
        print(json.dumps(to_json(title, described, job, found), indent=1))
    else:
        _print_table(title, described, found)
    if page is not None:
        from uneven.timeline.simulated_page import write_simulated_page

        write_simulated_page(page, title, described, found)
        print(f"wrote {page}", file=sys.stderr)


def read_file(path: Path, seed: int | None = None) -> "tuple[str, Cluster, Job]":
    """The title, cluster and job of a file."""
    from dataclasses import replace

    from uneven.config.sources import load_toml
    from uneven.simulate.scenario import read_scenario

    table = load_toml(path)
    described, job = read_scenario(table, str(path))
    return table.get("title", path.stem), described if seed is None else replace(described, seed=seed), job


def read_policies(text: str) -> "list[Policy]":
    """ "sync,async" -> those two; "all" -> every one."""
    from uneven.simulate.cluster import POLICIES

    names = list(POLICIES) if text == "all" else text.split(",")
    for name in names:
        if name not in POLICIES:
            raise InputError(f"--policy {name!r} is not one of {', '.join(POLICIES)}, all")
    return [one for one in POLICIES if one in names]


def to_json(title: str, cluster: "Cluster", job: "Job", found: "list[Simulated]") -> dict[str, Any]:
    """What --json prints; docs/simulate.md describes it."""
    return {
        "title": title,
        "ranks": len(cluster.ranks),
        "machines": len(set(cluster.machines)),
        "samples_per_s_alone": cluster.speed(job.batch_size),
        "results": [_result_json(one) for one in found],
    }


def _result_json(one: "Simulated") -> dict[str, Any]:
    from uneven.simulate.tally import STATES

    numbers = ("policy", "seconds", "seconds_per_epoch", "samples", "samples_per_s", "efficiency", "rounds")
    rest = ("limits", "failures", "joins", "trained_again", "counts", "shares", "over_time")
    return {
        **{name: getattr(one, name) for name in numbers},
        "seconds_per_epoch": one.seconds_per_epoch if math.isfinite(one.seconds_per_epoch) else None,
        "time": {state: one.mean(state) for state in STATES},
        "kinds": kinds_of(one),
        **{name: getattr(one, name) for name in rest},
    }


def kinds_of(one: "Simulated") -> list[dict[str, Any]]:
    """Per kind of device: how many ranks were ever there, their part of all samples, and their time by state."""
    from uneven.simulate.tally import STATES

    places: dict[str, list[int]] = {}
    for rank, name in enumerate(one.kinds):
        places.setdefault(name, []).append(rank)
    return [
        {
            "name": name,
            "count": len(ranks),
            "share": math.fsum(one.shares[rank] for rank in ranks),
            "time": {state: one.mean(state, ranks) for state in STATES},
        }
        for name, ranks in places.items()
    ]


def _check_page(page: Path) -> None:
    """InputError before anything is simulated, which may take a while, where no page could be written."""
    if page.is_dir():
        raise InputError(f"--page {page} is a folder; name a file, as in --page {page / 'simulated.html'}")
    if not page.parent.is_dir():
        raise InputError(f"--page {page}: there is no folder {page.parent}; make it, or name another one")


def _simulate_one(cluster: "Cluster", job: "Job", policy: "Policy", hours: float) -> "Simulated":
    from uneven.simulate.simulation import simulate as run

    if not hours > 0.0:
        raise InputError(f"--hours {hours:g} must be above 0")
    if len(cluster.ranks) >= MANY:
        print(f"simulating {policy} on {len(cluster.ranks):,} ranks ...", file=sys.stderr)
    return run(cluster, job, policy, hours)


def _read_numbers(text: str) -> list[int]:
    try:
        numbers = sorted({int(number) for number in text.split(",")})
    except ValueError:
        raise InputError(f"--curve {text!r} must be numbers of ranks with commas between them, as in 8,64") from None
    if numbers[0] < 1 or numbers[-1] > 100_000:
        raise InputError(f"--curve {text!r}: numbers of ranks must be between 1 and 100,000")
    return numbers


def _show_curve(
    cluster: "Cluster", job: "Job", policies: "list[Policy]", numbers: list[int], hours: float, as_json: bool
) -> None:
    rows = []
    for ranks in numbers:
        many = cluster.resized(ranks)
        rows += [(ranks, _simulate_one(many, job, policy, hours)) for policy in policies]
    if as_json:
        points = [{"ranks": ranks, **_result_json(one)} for ranks, one in rows]
        print(json.dumps({"points": points}, indent=1))
        return
    table = _new_table("ranks", "policy", "samples/s", "efficiency", "communication", "wait", "settling")
    for ranks, one in rows:
        shown = [_percent(one, state) for state in ("communication", "wait", "settling")]
        table.add_row(f"{ranks:,}", one.policy, f"{one.samples_per_s:,.0f}", f"{one.efficiency:.3f}", *shown)
    _print(table)
    print("\nWhat limits:")
    for ranks, one in rows:
        print(f"  {ranks:>7,}  {one.policy:8}  {one.limits}")


def _print_table(title: str, cluster: "Cluster", found: "list[Simulated]") -> None:
    machines = len(set(cluster.machines))
    print(f"{title}: {len(cluster.ranks):,} ranks on {machines:,} machine{'s' if machines > 1 else ''}\n")
    table = _new_table("policy", "s/epoch", "samples/s", "efficiency", "communication", "wait")
    for one in found:
        table.add_row(
            one.policy,
            f"{one.seconds_per_epoch:,.1f}" if math.isfinite(one.seconds_per_epoch) else "-",
            f"{one.samples_per_s:,.0f}",
            f"{one.efficiency:.3f}",
            _percent(one, "communication"),
            _percent(one, "wait"),
        )
    _print(table)
    print("\nWhat limits:")
    for one in found:
        print(f"  {one.policy:8}  {one.limits}")
    if any(one.failures or one.joins for one in found):
        print("\nLost and joined, and what was trained again:")
    for one in found:
        if one.failures or one.joins:
            print(f"  {one.policy:8}  {one.failures} lost, {one.joins} joined, {one.trained_again:,} samples again")


def _percent(one: "Simulated", state: str) -> str:
    return f"{100 * one.mean(state):.1f} %"


def _new_table(*headings: str) -> Any:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    return table


def _print(table: Any) -> None:
    from rich.console import Console

    print_whole(Console(highlight=False, markup=False), table)
