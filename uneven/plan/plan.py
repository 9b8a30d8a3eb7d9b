"""A plan: the probe, all predictions and the advice, as one JSON object; kept as plan.json in a run's folder.

Made by choose.py, for `uneven plan` and policy="auto". `launch/predicted.py` adds what the run achieved.
"""

import json
import platform
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, TypedDict

from uneven.config import RunConfig
from uneven.files import folder_error, mark_as_run, read_json, write_atomically
from uneven.hardware.cores import available_cores
from uneven.launch.predicted import PLAN
from uneven.plan.advise import Advice, advise, notes
from uneven.plan.predict import ALONE, Prediction, StrategyPrediction, predict, strategies
from uneven.plan.probe import Probe, allowed_policies, with_values
from uneven.version import __version__

VERSION = 1
SECONDS = 10.0  # of probing all devices together
FRESH = timedelta(hours=24)
# What decides how long a step takes, and what may be advised; with other values a plan that is found is not taken.
_COMPARED = (
    *("batch_size", "accumulate", "global_batch_size", "epochs", "max_steps", "precision", "compile", "backend"),
    *("num_workers", "sync_batchnorm", "activations", "shares", "memory_cap", "anchor", "max_anchor", "strategy"),
    "min_ranks",
)
# One entry per device: those of a subset are taken from it.
PER_DEVICE = ("shares", "memory_shares", "memory_cap")


class PlanDocument(TypedDict):
    """A plan as it is written and printed."""

    version: int
    date: str
    uneven: str
    asked: dict[str, Any]  # what the plan is of
    recommendation: dict[str, Any]
    predicted: dict[str, Any]  # of what a run follows
    achieved: dict[str, Any] | None  # by that run
    predictions: list[dict[str, Any]]
    strategies: list[dict[str, Any]]
    notes: list[str]
    probe: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What was measured, what follows from it, and what to do. `asked`: what the plan is of.

    `date` is when it was measured, in ISO form: a plan that is read and written again gets no younger.
    """

    probe: Probe
    predictions: tuple[Prediction, ...]
    strategies: tuple[StrategyPrediction, ...]
    advice: Advice
    asked: Mapping[str, Any]
    date: str

    @property
    def notes(self) -> list[str]:
        return notes(self.probe, self.predictions)

    def prediction(self, policy: str, devices: Sequence[str]) -> Prediction | None:
        """Of a policy on these devices; of one device alone whatever the policy."""
        wanted = ALONE if len(devices) == 1 else policy
        return next((p for p in self.predictions if p.policy == wanted and p.devices == tuple(devices)), None)

    def to_json(self, chosen: Prediction | None = None) -> PlanDocument:
        """As it is written and printed; `chosen`: the prediction that the run follows, otherwise the advice's."""
        chosen = chosen or self.prediction(self.advice.policy, self.advice.devices)
        assert chosen is not None, "the advice is one of the predictions"
        return {
            "version": VERSION,
            "date": self.date,
            "uneven": __version__,
            "asked": dict(self.asked),
            "recommendation": {**asdict(self.advice), "is_one_device": self.advice.is_one_device},
            "predicted": {**asdict(chosen), **_scale(self.probe, chosen)},
            "achieved": None,
            "predictions": [asdict(one) for one in self.predictions],
            "strategies": [asdict(one) for one in self.strategies],
            "notes": self.notes,
            "probe": self.probe.to_json(),
        }


def _scale(probe: Probe, chosen: Prediction) -> dict[str, float]:
    """What `launch/predicted.py` needs to compare a run with the prediction."""
    return {
        "samples_per_epoch": probe.job.samples_per_epoch,
        "sum_of_speeds": chosen.samples_per_s / chosen.efficiency,
    }


def plan_from(found: Probe, asked: Mapping[str, Any], date: str | None = None) -> Plan:
    """The plan that follows from a probe; without `date` it was measured now."""
    predictions = predict(found)
    advice = advise(found, predictions)
    date = date or datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Plan(found, tuple(predictions), tuple(strategies(found)), advice, asked, date)


def asked_for(config: RunConfig) -> dict[str, Any]:
    """What a plan is of: script and arguments, devices, machine, and the settings that matter.

    The same again: the plan holds.
    """
    settings = config.to_json()
    return {
        "script": _script(),
        "args": sys.argv[1:],  # another model or data set, perhaps
        "devices": config.devices,
        "host": platform.node(),
        "cores": len(available_cores()),
        "candidates": list(allowed_policies(config)),
        **{name: settings[name] for name in _COMPARED},
    }


def _script() -> str:
    """The program that runs, with a checksum of its text; a notebook has none."""
    path = Path(sys.argv[0]) if sys.argv else Path()
    try:
        return f"{path.resolve()} {zlib.crc32(path.read_bytes()):08x}" if path.is_file() else ""
    except OSError:
        return ""


def write_plan(plan: Plan, out: Path) -> None:
    """Into the folder of a run to come, which takes it; MachineError where that cannot be written."""
    try:
        if not out.exists() or not any(out.iterdir()):
            out.mkdir(parents=True, exist_ok=True)
            mark_as_run(out)  # otherwise the run to come would find a file in it that no run wrote
        write_atomically(out / PLAN, json.dumps(plan.to_json(), indent=1).encode())
    except OSError as error:
        raise folder_error(out, error) from error


def read_plan(folder: Path | None, asked: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """The plan in a folder, where there is one of this version; with `asked`, only a fresh one of the same job."""
    found = None if folder is None else read_json(folder / PLAN)
    if not isinstance(found, dict) or found.get("version") != VERSION or found.get("uneven") != __version__:
        return None
    if asked is None:
        return found
    try:
        age = datetime.now(timezone.utc) - datetime.fromisoformat(found["date"])
        is_same = found["asked"] == json.loads(json.dumps(asked))
    except (KeyError, TypeError, ValueError):
        return None
    return found if is_same and asked["script"] and timedelta(0) <= age <= FRESH else None


def restored(found: Mapping[str, Any]) -> Plan | None:
    """A plan that was read; None where it is damaged."""
    try:
        return plan_from(Probe.from_json(found["probe"]), found["asked"], found["date"])
    except (LookupError, TypeError, ValueError):
        return None


def chosen_config(config: RunConfig, plan: Plan) -> RunConfig:
    """The settings with the policy and the devices that the plan advises."""
    advice, candidates = plan.advice, plan.probe.job.candidates
    policy = advice.policy
    if advice.is_one_device:  # there it changes nothing, but settings of another one would be refused
        policy = "balanced" if "balanced" in candidates else candidates[0]
    values = {name: getattr(config, name) for name in PER_DEVICE}
    own = {
        name: tuple(value[rank] for rank in advice.ranks) if isinstance(value, tuple) else value
        for name, value in values.items()
    }
    if advice.is_one_device:
        own |= {"shares": None, "memory_shares": None}
    return with_values(config, policy=policy, devices=",".join(advice.devices), **own)
