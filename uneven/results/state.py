"""TrainedState: what a run leaves behind, in memory and on disk.

A folder holds `state.safetensors` (params and buffers under their plain names: any tool loads it),
`optimizer.safetensors` (optimizer state by param name, random states), `log.json` (which rank trained which samples,
for a replay) and `state.json` (tied names, param groups, history, position, a graph's structure, and length and
checksum of the others). `state.json` is written last: where it exists, the others are complete. A checkpoint
(results/checkpoint.py) is loaded in the same way, with the optimizer state of rank 0.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from uneven.config import results_of
from uneven.data.replay import log_record, read_parts, read_rounds
from uneven.data.sample_order import check_dropped, prove_exactly_once
from uneven.errors import InputError
from uneven.files import folder_error, sync_folder
from uneven.policy.axis import Axis
from uneven.results.checkpoint_folders import find_checkpoints
from uneven.results.record import RECORD, check_files, encode, read_record, record_head
from uneven.results.state_tree import join_tree, split_tree
from uneven.results.tensor_file import FileSum, open_tensors, write_file, write_tensors
from uneven.timeline.timeline import RunFacts, Timeline

# The fields that state.json has as they are; of the others it has the names, or log.json has them.
IN_RECORD = (
    *("finished", "stopped", "best", "slot", "samples", "dataset_samples", "tied", "param_groups", "history"),
    *("dropped", "config", "structure", "skipped"),
)


@dataclass(frozen=True, repr=False)
class TrainedState:
    """Params and buffers by name, on the CPU, with the run's history and timeline."""

    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    tied: dict[str, str] = field(default_factory=dict)  # further name -> the name it shares its tensor with
    optimizer: dict[str, Tensor] = field(default_factory=dict)  # "param.key", and "random.*"
    param_groups: list[dict[str, Any]] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)  # one entry per epoch and per evaluation inside one
    config: dict[str, Any] = field(default_factory=dict)
    slot: int = 0  # slots trained
    samples: int = 0  # samples trained, without those dropped
    dataset_samples: int = 0  # samples of one epoch
    finished: bool = True
    stopped: str | None = None  # why the run ended early, where a callback asked for it
    best: dict[str, Any] | None = None  # the entry of the history that params and optimizer are from; None: the last
    timeline: Timeline | None = None
    log: list[list[tuple[int, int, int]]] = field(default_factory=list)  # per rank: (slot, first, samples)
    # (slot, rank, first, samples) of those parts in `log` that were not finite: skipped, their samples not trained
    dropped: list[tuple[int, int, int, int]] = field(default_factory=list)
    rounds: list[list[tuple[int, int, int, float]]] = field(default_factory=list)  # per rank, of a local policy
    skipped: list[tuple[int, int]] = field(default_factory=list)  # (epoch, samples) left out by ddp.skip_rest()
    saves: list[int] = field(default_factory=list)  # slots at which checkpoints were taken
    stop_rounds: list[int] = field(default_factory=list)  # rounds after which a run of a local policy was stopped
    checkpoint: Path | None = None  # the last one that this run has saved
    # (slot, devices): where it began and was resumed, and the generations of its ranks with what a replay must know
    segments: list[dict[str, Any]] = field(default_factory=list)
    members: list[str | None] = field(default_factory=list)  # the name of each rank in `log`, where it is known
    folder: Path | None = None
    # What else the model's state_dict has, by its name there: what `get_extra_state` of a module gives
    extra: dict[str, Any] = field(default_factory=dict)
    structure: str | None = None  # of a model that describes what it computes, line by line

    @property
    def rank_samples(self) -> list[int]:
        """The samples that each rank trained, without those dropped."""
        trained = [sum(samples for _, _, samples in log) for log in self.log]
        for _, rank, _, samples in self.dropped:
            trained[rank] -= samples
        return trained

    @property
    def samples_since_start(self) -> int:
        """The samples trained since the run was started or resumed last: its timeline is of these."""
        return self.samples - (self._starts[-1].get("samples", 0) if self._starts else 0)

    @property
    def run_facts(self) -> RunFacts:
        """What its timeline must know of the parts before."""
        last = self._starts[-1] if len(self._starts) > 1 else {}
        return RunFacts(last.get("slot"), last.get("samples", 0))

    @property
    def _starts(self) -> list[dict[str, Any]]:
        """The segments that begin with a start or a resume; generations of ranks are segments, too."""
        return [segment for segment in self.segments if "generation" not in segment]

    def load_into(self, model: nn.Module) -> nn.Module:
        """Give a model of the same shape these params and buffers; a graph must be the same graph, too."""
        if not isinstance(model, nn.Module):
            raise InputError(f"load_into takes a model, as in state.load_into(Net()), got {model!r}")
        check_structure = getattr(model, "check_structure", None)
        if self.structure is not None and callable(check_structure):
            check_structure(self.structure, "the state")
        entries = {**self.params, **self.buffers, **self.extra}
        entries.update({name: self.params[source] for name, source in self.tied.items()})
        try:
            model.load_state_dict(entries)
        except RuntimeError as error:
            faults = "; ".join(line.strip() for line in str(error).splitlines()[1:3])
            raise InputError(f"the state does not fit {type(model).__name__}: {faults or error}") from error
        return model

    def __repr__(self) -> str:
        return f"TrainedState({'; '.join(f'{name} {value}' for name, value in self._facts().items())})"

    def _repr_html_(self) -> str:
        """The short table that a notebook shows."""
        cells = ((escape(name), escape(value)) for name, value in self._facts().items())
        rows = (f"<tr><th style='text-align: left'>{name}</th><td>{value}</td></tr>" for name, value in cells)
        return f"<table>{''.join(rows)}</table>"

    def _facts(self) -> dict[str, str]:
        """What a person wants to know first, without any tensor."""
        numbers = sum(param.numel() for param in self.params.values())
        last = self.history[-1] if self.history else {}
        metrics = {name: value for name, value in results_of(last).items() if isinstance(value, float)}
        epochs = sum(not entry.get("is_inside_epoch") for entry in self.history)
        facts = {
            "model": f"{numbers:,} params in {len(self.params)} tensors, {len(self.buffers)} buffers",
            "trained": f"{self.samples:,} samples in {self.slot:,} steps, {epochs} epochs"
            + ("" if self.finished else " (stopped before its end)"),
        }
        if metrics:
            facts["last epoch"] = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        if self.config:
            facts["devices"] = f"{self.config.get('devices')}, policy {self.config.get('policy')}"
        if self.folder is not None:
            facts["folder"] = str(self.folder)
        return facts

    def record(self) -> dict[str, Any]:
        """The entries of `state.json` that are the state's own."""
        return {
            **{name: getattr(self, name) for name in IN_RECORD},
            "params": list(self.params),  # in the model's order, which safetensors does not keep
            "buffers": list(self.buffers),
            "extra": split_tree(self.extra, "extra")[0],
            "checkpoint": None if self.checkpoint is None else str(self.checkpoint),
        }

    def save(self, folder: str | Path) -> Path:
        folder = Path(folder)
        files: dict[str, FileSum] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=folder, prefix=".state.partial-") as hidden:
                work = Path(hidden)
                for name, tensors in (
                    ("state.safetensors", {**self.params, **self.buffers}),
                    ("optimizer.safetensors", {**self.optimizer, **split_tree(self.extra, "extra")[1]}),
                ):
                    files[name] = write_tensors(work / name, tensors)
                if self.log:
                    head = (self.dataset_samples, self.slot, self.config, self.skipped)
                    resumed = {"saves": self.saves, "stop_rounds": self.stop_rounds, "segments": self.segments}
                    resumed |= {"members": self.members} if self.members else {}
                    log = log_record(self.log, self.rounds, self.dropped, *head, resumed)
                    files["log.json"] = write_file(work / "log.json", json.dumps(log).encode())
                write_file(work / RECORD, encode({**record_head("result", files), **self.record()}))
                (folder / RECORD).unlink(missing_ok=True)  # of an earlier state: it does not describe these files
                for name in (*files, RECORD):
                    (work / name).replace(folder / name)
            sync_folder(folder)
        except OSError as error:
            raise folder_error(folder, error) from error
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> "TrainedState":
        """A state that `save` wrote, or a checkpoint; InputError in one line where a file is missing or damaged.

        A result comes with its log, without its timeline; the log of a checkpoint is its ranks' own.
        """
        folder = Path(folder)
        if not (folder / RECORD).is_file():
            checkpoint = next(iter(find_checkpoints(folder)), None)
            hint = "was the run finished?" if checkpoint is None else f"its newest checkpoint is {checkpoint}"
            raise InputError(f"no trained state in {folder}: there is no state.json ({hint})")
        what = f"state {folder}"
        record = read_record(folder, what)
        check_files(folder, record, what)
        tensors = open_tensors(folder / "state.safetensors", what)
        is_checkpoint = record.get("kind") == "checkpoint"
        optimizer = open_tensors(folder / ("rank-0.safetensors" if is_checkpoint else "optimizer.safetensors"), what)
        extra = {name: optimizer[name] for name in optimizer if name.startswith("extra.")}
        try:
            plain = {name: record[name] for name in IN_RECORD if name in record}
            plain |= {name: [tuple(row) for row in record.get(name, ())] for name in ("dropped", "skipped")}
            return cls(
                **{
                    **plain,
                    "best": None if is_checkpoint else record.get("best"),
                },  # a checkpoint's params are the last
                params={name: tensors[name] for name in record["params"]},
                buffers={name: tensors[name] for name in record["buffers"]},
                extra=join_tree(record.get("extra", {}), extra),
                optimizer=_rank_0_optimizer(folder, optimizer)
                if is_checkpoint
                else {name: optimizer[name] for name in optimizer if name not in extra},
                folder=folder,
                checkpoint=Path(record["checkpoint"]) if record.get("checkpoint") else None,
                **_read_log(folder, record),
            )
        except KeyError as error:
            raise InputError(f"{what}: there is no {error} in it") from error


def _read_log(folder: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that a result has in log.json, whose checksum was compared; of a checkpoint its segments."""
    if "log.json" not in record.get("files", {}):
        return {"segments": record.get("segments", [])}
    log = json.loads((folder / "log.json").read_bytes())
    plain = {name: log.get(name, []) for name in ("saves", "stop_rounds", "segments", "members")}
    parts, rounds = [read_parts(rows) for rows in log["ranks"]], [read_rounds(rows) for rows in log["rounds"]]
    return {"log": parts, "rounds": rounds, **plain}


def _rank_0_optimizer(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Optimizer state, numbers in it included, and random states of a checkpoint's rank 0."""
    names = {name: name.removeprefix("optimizer.") for name in tensors if name.startswith(("optimizer.", "random."))}
    found = {plain: tensors[name] for name, plain in names.items()}
    tree = json.loads((folder / "rank-0.json").read_bytes()).get("optimizer") or {}
    state = join_tree(tree.get("state", {}), tensors)
    return found | {path: torch.as_tensor(value) for path, value in _flat(state) if path not in found}


def verified_state(
    state: TrainedState,
    axis: Axis,
    logs: list[list[tuple[int, int, int]]],
    rounds: list[list[tuple[int, int, int, float]]],
    timelines: list[Timeline],
    dropped: list[list[tuple[int, int, int]]] | None = None,
) -> TrainedState:
    """A rank's state with every rank's log and timeline; raises unless every sample was trained or dropped once."""
    was_claimed = any(rounds) and not state.finished
    slots = prove_exactly_once(axis, logs, None if was_claimed else state.slot, state.skipped)
    by_rank = enumerate(dropped or [])
    lost = sorted((slot, rank, first, samples) for rank, parts in by_rank for slot, first, samples in parts)
    check_dropped(logs, lost)
    samples = sum(samples for log in logs for _, _, samples in log) - sum(samples for _, _, _, samples in lost)
    merged = replace(Timeline.merge(timelines), run=state.run_facts)
    return replace(state, slot=slots, samples=samples, timeline=merged, log=logs, rounds=rounds, dropped=lost)


def read_structure(model: nn.Module) -> str | None:
    """The model's own description of its structure, if it has one: names and shapes do not tell ReLU from GELU."""
    structure = getattr(model, "structure", None)
    return structure if isinstance(structure, str) else None


def capture_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The tensor fields of a TrainedState: contiguous clones, since safetensors refuses anything else."""
    values = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    # Not `optimizer.state`: one with optimizers inside, as MuonAdamW, keeps none by itself.
    return join_state(model, optimizer, values, optimizer.state_dict())


def join_state(
    model: nn.Module, optimizer: Optimizer, whole_model: Mapping[str, Tensor], whole_optimizer: Mapping[str, Any]
) -> dict[str, Any]:
    """The same for a sharded model, whose full state was gathered: as `state_dict` of model and optimizer give it."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    # A key that is no place is the optimizer's own, such as "global".
    state = {params[k] if isinstance(k, int) else k: found for k, found in whole_optimizer["state"].items()}
    fields, first_name = model_fields(model, whole_model, optimizer)
    for kind in ("params", "buffers"):
        fields[kind] = {name: _clone(tensor) for name, tensor in fields[kind].items()}
    return {**fields, "optimizer": _optimizer_tensors(state, first_name)}


def model_fields(
    model: nn.Module, values: Mapping[str, Tensor], optimizer: Optimizer
) -> tuple[dict[str, Any], dict[Tensor, str]]:
    """The fields of a TrainedState but for the optimizer's tensors, without a copy; and the params' names."""
    first_name: dict[Tensor, str] = {}
    tied = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if param in first_name:
            tied[name] = first_name[param]
        else:
            first_name[param] = name
    entries, names = model.state_dict(), set(first_name.values())
    buffers = {name: values[name].detach() for name, _ in model.named_buffers() if name in entries}
    fields = {
        "params": {name: values[name].detach() for name in first_name.values()},
        "buffers": buffers,
        "extra": {
            name: copy.deepcopy(entry)
            for name, entry in entries.items()
            if name not in buffers and name not in tied and name not in names
        },
        "tied": tied,
        "param_groups": [_plain_group(group, first_name) for group in optimizer.param_groups],
    }
    return fields, first_name


def _flat(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Tensors and numbers of a state by their path; some optimizers nest them in lists and dicts (Shampoo)."""
    if isinstance(state, Mapping | list | tuple):
        for key, value in state.items() if isinstance(state, Mapping) else enumerate(state):
            yield from _flat(value, f"{path}.{key}" if path else str(key))
    elif isinstance(state, Tensor | int | float):
        yield path, state


def _optimizer_tensors(states: Mapping[Any, Any], names: dict[Tensor, str]) -> dict[str, Tensor]:
    tensors = {}
    for param, state in states.items():
        name = names.get(param, "unnamed") if isinstance(param, Tensor) else str(param)
        for key, value in _flat(state):
            tensors[f"{name}.{key}" if key else name] = _clone(torch.as_tensor(value))
    tensors["random.cpu"] = torch.get_rng_state()
    if torch.cuda.is_initialized():
        tensors["random.cuda"] = torch.cuda.get_rng_state()
    return tensors


def _plain_group(group: dict[str, Any], names: dict[Tensor, str]) -> dict[str, Any]:
    plain = {key: value.tolist() if isinstance(value, Tensor) else value for key, value in group.items()}
    return {
        **{key: copy.deepcopy(value) for key, value in plain.items() if key != "params" and _is_json(value)},
        "params": [names.get(param, "unnamed") for param in group["params"]],
    }


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _clone(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
