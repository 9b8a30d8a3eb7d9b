"""Where a graph's forward spends time and memory, node by node."""

import copy
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from uneven.errors import InputError
from uneven.graph.describe import in_bytes, is_inner, short, table
from uneven.graph.observe import Compute, observed
from uneven.graph.plan import Node
from uneven.graph.plan_module import PlanModule

WARM_UP = 2  # runs that are not counted


@dataclass(frozen=True)
class Row:
    """One node: the median of its forward time, what its value takes and what its params take."""

    path: str
    what: str
    ms: float
    output_bytes: int
    param_bytes: int
    is_inner: bool  # it holds nodes that have rows of their own
    own_ms: float = 0.0  # what an inner one takes besides them


@dataclass(frozen=True)
class Profile:
    rows: tuple[Row, ...]
    forward_ms: float  # of the whole, as it runs without anybody looking on

    def __getitem__(self, path: str) -> Row:
        found = next((row for row in self.rows if row.path == path), None)
        if found is None:
            raise InputError(f"the profile has no node {path!r}: it has {', '.join(row.path for row in self.rows)}")
        return found

    @property
    def node_ms(self) -> float:
        """What all nodes take, nothing counted twice."""
        return sum(row.own_ms if row.is_inner else row.ms for row in self.rows)

    def share(self, row: Row) -> float:
        return row.ms / max(self.node_ms, 1e-9)

    def __str__(self) -> str:
        lines = [
            (row.path, row.what, f"{row.ms:.3f}", f"{self.share(row):.1%}", in_bytes(row.output_bytes), _params(row))
            for row in self.rows
        ]
        head = ("node", "module", "ms", "share", "value", "params")
        return table(head, lines) + f"\nforward {self.forward_ms:.3f} ms; node by node {self.node_ms:.3f} ms"


def profile(graph: PlanModule, batch: tuple[Any, ...], repeats: int = 10) -> Profile:
    """Run a copy of the graph on a batch, in the mode it is in; the graph itself is left as it was."""
    subject = copy.deepcopy(graph)
    watch = _Watch()
    whole_ms = []
    batch = tuple(one.clone() if isinstance(one, Tensor) else one for one in batch)
    devices = sorted({one.device.index or 0 for one in batch if isinstance(one, Tensor) and one.is_cuda})
    with torch.random.fork_rng(devices), torch.no_grad():
        for run in range(WARM_UP + repeats):
            started = _now(batch)
            subject(*batch)
            whole_ms.append(1e3 * (_now(batch) - started))
            with observed(subject, watch):
                subject(*batch)
            watch.end_run(is_counted=run >= WARM_UP)
    ms = {path: 1e3 * statistics.median(times) for path, times in watch.times.items() if times}
    rows = tuple(
        Row(path, watch.what[path], ms[path], watch.output_bytes[path], watch.param_bytes[path], watch.is_inner[path])
        for path in ms
    )
    rows = tuple(replace(row, own_ms=_own_ms(row, rows)) if watch.has_own_work[row.path] else row for row in rows)
    return Profile(rows, statistics.median(whole_ms[WARM_UP:]))


def _own_ms(row: Row, rows: tuple[Row, ...]) -> float:
    """What a gate, loop, switch or map does besides the graphs in it: its router, its condition, its plain experts."""
    inside = [one for one in rows if one.path.startswith(f"{row.path}.")]
    direct = [one for one in inside if not any(one.path.startswith(f"{other.path}.") for other in inside)]
    return max(0.0, row.ms - sum(one.ms for one in direct))


class _Watch:
    """The observer: seconds of each run by path, and what stays the same from run to run.

    A node in a loop runs several times in one run; they add up.
    """

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}
        self._run: dict[str, float] = {}
        self.what: dict[str, str] = {}
        self.output_bytes: dict[str, int] = {}
        self.param_bytes: dict[str, int] = {}
        self.is_inner: dict[str, bool] = {}
        self.has_own_work: dict[str, bool] = {}

    def __call__(self, path: str, graph: PlanModule, node: Node, inputs: tuple[Any, ...], compute: Compute) -> Any:
        if node.kind == "input":
            return compute()
        before = self._run.setdefault(path, 0.0)  # here already, so that a graph stands before its nodes
        started = _now(inputs)
        value = compute()
        self._run[path] = before + _now(inputs) - started
        module = graph.get_submodule(node.target) if node.target else nn.Identity()
        self.what[path] = short(module) if node.target else node.kind
        self.output_bytes[path] = value.numel() * value.element_size() if isinstance(value, Tensor) else 0
        self.param_bytes[path] = sum(
            param.numel() * param.element_size() for param in module.parameters() if not is_lazy(param)
        )
        self.is_inner[path] = is_inner(module)
        self.has_own_work[path] = is_inner(module) and not isinstance(module, PlanModule)
        return value

    def end_run(self, is_counted: bool) -> None:
        for path, seconds in self._run.items():
            self.times.setdefault(path, []).extend([seconds] * is_counted)
        self._run.clear()


def _now(values: tuple[Any, ...]) -> float:
    """The time, once the device of these values has done what it was given."""
    for value in values:
        if isinstance(value, Tensor) and value.is_cuda:
            torch.cuda.synchronize(value.device)
    return time.perf_counter()


def _params(row: Row) -> str:
    return in_bytes(row.param_bytes) if row.param_bytes else ""
