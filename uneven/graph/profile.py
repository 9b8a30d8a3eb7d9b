"""Time and memory of a graph's forward, node by node. `Graph.profile` calls it."""

import copy
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from uneven.errors import InputError
from uneven.format import format_bytes
from uneven.graph.describe import is_inner, short, table
from uneven.graph.observe import Compute, observed
from uneven.graph.plan import Node, PlanModule

WARM_UP = 2  # runs before the measurement


@dataclass(frozen=True)
class NodeProfile:
    """One node: the median of its forward time, and the bytes of its output and of its params."""

    path: str
    what: str
    ms: float
    output_bytes: int
    param_bytes: int
    is_inner: bool  # it contains a graph, whose nodes are listed themselves
    own_ms: float = 0.0  # of such a node: the time outside its nodes


@dataclass(frozen=True)
class Profile:
    nodes: tuple[NodeProfile, ...]
    forward_ms: float  # of the whole graph, measured without an observer

    def __getitem__(self, path: str) -> NodeProfile:
        node = next((row for row in self.nodes if row.path == path), None)
        if node is None:
            raise InputError(f"the profile has no node {path!r}: it has {', '.join(row.path for row in self.nodes)}")
        return node

    @property
    def node_ms(self) -> float:
        """The sum over all nodes; nested nodes are counted once."""
        return sum(row.own_ms if row.is_inner else row.ms for row in self.nodes)

    def share(self, row: NodeProfile) -> float:
        return row.ms / max(self.node_ms, 1e-9)

    def __str__(self) -> str:
        lines = [
            (
                row.path,
                row.what,
                f"{row.ms:.3f}",
                f"{self.share(row):.1%}",
                format_bytes(row.output_bytes),
                _params(row),
            )
            for row in self.nodes
        ]
        head = ("node", "module", "ms", "share", "value", "params")
        return table(head, lines) + f"\nforward {self.forward_ms:.3f} ms; node by node {self.node_ms:.3f} ms"


def profile(graph: PlanModule, batch: tuple[Any, ...], repeats: int = 10) -> Profile:
    """Run a copy of the graph on a batch, in its current mode; the graph itself does not change."""
    subject = copy.deepcopy(graph)
    stopwatch = _Stopwatch()
    whole_ms = []
    batch = tuple(value.clone() if isinstance(value, Tensor) else value for value in batch)
    devices = sorted({value.device.index or 0 for value in batch if isinstance(value, Tensor) and value.is_cuda})
    with torch.random.fork_rng(devices), torch.no_grad():
        for run in range(WARM_UP + repeats):
            started = _now(batch)
            subject(*batch)
            whole_ms.append(1e3 * (_now(batch) - started))
            with observed(subject, stopwatch):
                subject(*batch)
            stopwatch.end_run(is_counted=run >= WARM_UP)
    ms = {path: 1e3 * statistics.median(times) for path, times in stopwatch.times.items() if times}
    rows = tuple(replace(stopwatch.rows[path], ms=time) for path, time in ms.items())
    rows = tuple(replace(row, own_ms=_own_ms(row, rows)) if row.path in stopwatch.own_work else row for row in rows)
    return Profile(rows, statistics.median(whole_ms[WARM_UP:]))


def _own_ms(row: NodeProfile, rows: tuple[NodeProfile, ...]) -> float:
    """The time of a gate, loop, switch or map outside the graphs in it: router, condition, plain modules."""
    inside = [inner for inner in rows if inner.path.startswith(f"{row.path}.")]
    direct = [inner for inner in inside if not any(inner.path.startswith(f"{other.path}.") for other in inside)]
    return max(0.0, row.ms - sum(inner.ms for inner in direct))


class _Stopwatch:
    """The observer: seconds of each run by path, and the facts that are the same in every run.

    A node in a loop executes several times in one run; its times are added up.
    """

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}
        self._run: dict[str, float] = {}
        self.rows: dict[str, NodeProfile] = {}  # without their times
        self.own_work: set[str] = set()  # control flow, which does something outside the graphs in it

    def __call__(self, path: str, graph: PlanModule, node: Node, inputs: tuple[Any, ...], compute: Compute) -> Any:
        if node.kind == "input":
            return compute()
        before = self._run.setdefault(path, 0.0)  # inserted before it runs, so that a graph is listed before its nodes
        started = _now(inputs)
        value = compute()
        self._run[path] = before + _now(inputs) - started
        module = graph.get_submodule(node.target) if node.target else nn.Identity()
        num_bytes = value.numel() * value.element_size() if isinstance(value, Tensor) else 0
        params = sum(param.numel() * param.element_size() for param in module.parameters() if not is_lazy(param))
        what = short(module) if node.target else node.kind
        self.rows[path] = NodeProfile(path, what, 0.0, num_bytes, params, is_inner(module))
        if is_inner(module) and not isinstance(module, PlanModule):
            self.own_work.add(path)
        return value

    def end_run(self, is_counted: bool) -> None:
        for path, seconds in self._run.items():
            self.times.setdefault(path, []).extend([seconds] * is_counted)
        self._run.clear()


def _now(values: tuple[Any, ...]) -> float:
    """The time after the devices of these values have finished their work."""
    for value in values:
        if isinstance(value, Tensor) and value.is_cuda:
            torch.cuda.synchronize(value.device)
    return time.perf_counter()


def _params(row: NodeProfile) -> str:
    return format_bytes(row.param_bytes) if row.param_bytes else ""
