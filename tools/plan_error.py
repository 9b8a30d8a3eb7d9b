"""How far predictions of `uneven plan` are from what is measured: seconds per epoch, over models, policies and devices.

    python tools/plan_error.py --out plan-error.jsonl                    all models, some minutes each
    python tools/plan_error.py --models mlp,lenet --devices cpu,cpu@0.4

For each model and set of devices it probes once, as a plan does, and then trains short runs: each policy on all
devices, and the fastest device alone. A row is one run: some epochs over so many samples that an epoch takes some
seconds; their mean is predicted from the probe for just so many samples. Fast devices train a whole data set in less:
give them more epochs. Rows are appended to the file as they come, and those that are there are not measured again: an
interrupted call goes on where it was. Probes and runs that other programs disturbed are made again, up to three times
in all; if the last one was disturbed, too, its row is marked and does not count. Prints the median and the 90th
percentile of the errors, and how far the advice is from the best measured choice.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from uneven.bench import models
from uneven.bench.models.sets import load_set
from uneven.config import LOCAL_POLICIES, POLICIES, Task, resolve
from uneven.errors import MachineError, RankError
from uneven.hardware.interference import measure_interference
from uneven.launch.run import launch
from uneven.plan.measure import probe
from uneven.plan.plan import Plan, plan_from
from uneven.plan.predict import ALONE
from uneven.plan.probe import Probe
from uneven.results.state import TrainedState

PAIRS = ("cpu,cpu@0.4", "cpu,cpu")
TRIES = 3
LEAST_STEPS = 12  # of an epoch, of all devices together


def main() -> None:
    args = read_arguments()
    rows = read_rows(args.out)
    if not args.report:
        for name in args.models:
            for devices in args.devices:
                measure(name, devices, rows, args)
    report(rows, set(args.models), set(args.devices))


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", type=lambda text: text.split(","), default=list(models.NAMES), help="comma-separated"
    )
    parser.add_argument("--devices", action="append", help="repeat for several sets; default: cpu,cpu@0.4 and cpu,cpu")
    parser.add_argument("--data", help="another data set for all models, as in mnist-mini")
    parser.add_argument("--compile", default="off", help="as in fit: off, default or graph")
    parser.add_argument("--seconds", type=float, default=10.0, help="of probing, as in uneven plan")
    parser.add_argument("--epoch-seconds", type=float, default=4.0, help="of a measured epoch, about")
    parser.add_argument("--epochs", type=int, default=3, help="of a measured run")
    parser.add_argument("--out", type=Path, default=Path("plan-error.jsonl"))
    parser.add_argument("--report", action="store_true", help="print what is in the file, measure nothing")
    args = parser.parse_args()
    args.devices = args.devices or list(PAIRS)
    return args


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Those of earlier calls; a last line that was cut off is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:  # noqa: PERF203, a handful
            continue
    return rows


def add(rows: list[dict[str, Any]], row: dict[str, Any], path: Path) -> None:
    rows.append(row)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def measure(name: str, devices: str, rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """The probe and the runs of one model on one set of devices, as far as they are not there."""
    key = {"model": name, "devices": devices}
    recipe = models.get(name)
    try:
        data = load_set(args.data or recipe.data)
    except MachineError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return
    make_model = recipe.make_model if data.vocabulary is None else partial(recipe.make_model, data.vocabulary)
    task = Task(make_model, recipe.make_optimizer, recipe.train_step, data.train, None, None)
    settings = {
        "batch_size": recipe.batch_size,
        "epochs": args.epochs,
        "devices": devices,
        "compile": args.compile,
        "progress": "off",
    }
    found = next((row["probe"] for row in rows if row["kind"] == "probe" and key.items() <= row.items()), None)
    if found is None:
        began = time.perf_counter()
        for _ in range(TRIES):
            found = probe(task, resolve({**settings, "policy": "auto"}), args.seconds, print).to_json()
            if not found["is_disturbed"]:
                break
        add(rows, {"kind": "probe", **key, "probe": found}, args.out)
        print(f"{name} on {devices}: probed in {time.perf_counter() - began:.0f} s", flush=True)
    plan = plan_from(Probe.from_json(found), {})
    alone = next(one for one in plan.predictions if one.policy == ALONE)
    ways = [(policy, devices) for policy in POLICIES] + [(ALONE, alone.devices[0])]
    for policy, used in ways:
        done = {"kind": "run", **key, "policy": policy, "used": used}
        if any(done.items() <= row.items() for row in rows):
            continue
        try:
            add(rows, {**done, **undisturbed_run(task, settings, plan, policy, used, args)}, args.out)
        except RankError as error:
            print(f"{name} {policy} on {used}: {error}", file=sys.stderr)
            continue
        row = rows[-1]
        print(
            f"{name:12} {policy:9} {used:12} predicted {row['predicted']:7.2f} s, measured {row['measured']:7.2f} s "
            f"({row['error']:+.0%}){' disturbed' if row['is_disturbed'] else ''}",
            flush=True,
        )


def undisturbed_run(
    task: Task, settings: dict[str, Any], plan: Plan, policy: str, used: str, args: argparse.Namespace
) -> dict[str, Any]:
    """The first run that nobody disturbed, or the last one that was made, marked."""
    for _ in range(TRIES):
        with measure_interference() as span:
            row = run(task, settings, plan, policy, used, args)
        if not span.interference.is_disturbed:
            break
    return {**row, "is_disturbed": plan.probe.is_disturbed or span.interference.is_disturbed}


def run(
    task: Task, settings: dict[str, Any], plan: Plan, policy: str, used: str, args: argparse.Namespace
) -> dict[str, Any]:
    """A short run, and what the plan predicts for just that."""
    names = used.split(",")
    rough = plan.prediction(policy, names)
    assert rough is not None, "every policy on all devices is predicted"
    job = plan.probe.job
    wanted = max(LEAST_STEPS * job.batch_size * len(names), int(rough.samples_per_s * args.epoch_seconds))
    samples = min(len(task.dataset), wanted)
    short = replace(plan.probe, job=replace(job, samples_per_epoch=samples, epochs=args.epochs))
    exact = plan_from(short, {}).prediction(policy, names)
    assert exact is not None, "as above"
    own = {**settings, "devices": used, "policy": "balanced" if policy == ALONE else policy}
    state = launch(replace(task, dataset=task.dataset.first(samples)), resolve(own)).join()
    measured = epoch_s(state, policy, args.epochs)
    predicted = exact.seconds_per_epoch
    return {
        "samples": samples,
        "predicted": predicted,
        "measured": measured,
        "error": predicted / measured - 1.0,
        "samples_per_s": samples / measured,
    }


def epoch_s(state: TrainedState, policy: str, epochs: int) -> float:
    """Seconds of an epoch: the mean after the first one, where ranks step together.

    In the local policies it is the mean of all. There ranks are ahead when the average that ends an epoch is taken: the
    second of two short epochs seemed to take half as long as it did.
    """
    entries = [entry for entry in state.history if not entry.get("is_inside_epoch")]
    first, last = entries[0]["train_seconds"], entries[-1]["train_seconds"]
    return float(last / epochs if policy in LOCAL_POLICIES else (last - first) / (epochs - 1))


def report(rows: list[dict[str, Any]], names: set[str], devices: set[str]) -> None:
    asked = [row for row in rows if row["kind"] == "run" and row["model"] in names and row["devices"] in devices]
    runs = [row for row in asked if not row["is_disturbed"]]
    errors = sorted(abs(row["error"]) for row in runs)
    if not errors:
        print("nothing was measured")
        return
    middle, late = errors[len(errors) // 2], errors[min(len(errors) - 1, int(0.9 * len(errors)))]
    print(f"\n{len(asked) - len(runs)} of {len(asked)} rows are disturbed, and do not count")
    print(f"{len(errors)} runs: median error {middle:.1%}, 90th percentile {late:.1%}, largest {errors[-1]:.1%}")
    for policy in (*POLICIES, ALONE):
        own = sorted(abs(row["error"]) for row in runs if row["policy"] == policy)
        if own:
            print(f"  {policy:9} median {own[len(own) // 2]:.1%}, largest {own[-1]:.1%}")
    for row in rows:
        if row["kind"] == "probe" and row["model"] in names and row["devices"] in devices:
            judge_advice(row, [one for one in runs if (one["model"], one["devices"]) == (row["model"], row["devices"])])


def judge_advice(row: dict[str, Any], runs: list[dict[str, Any]]) -> None:
    """Whether the plan's advice, for a long run, is the best that was measured or within 5 % of it."""
    found = Probe.from_json(row["probe"])
    plan = plan_from(replace(found, start_s=0.0), {})
    advice = plan.advice
    taken = [one for one in runs if one["policy"] == advice.policy and one["used"] == ",".join(advice.devices)]
    if not taken or len(runs) < len(POLICIES) + 1:
        return
    best = max(runs, key=lambda one: one["samples_per_s"])
    behind = best["samples_per_s"] / taken[0]["samples_per_s"] - 1.0
    verdict = "best" if taken[0] is best else f"{'within 5 %' if behind <= 0.05 else 'NOT within 5 %'} ({behind:.1%})"
    print(
        f"  {row['model']} on {row['devices']}: advice {advice.policy} on {','.join(advice.devices)}: {verdict}, "
        f"best measured is {best['policy']} on {best['used']}"
    )


if __name__ == "__main__":
    main()
