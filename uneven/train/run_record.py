"""What a run knows of its own past, over all its segments: kept by the worker, in checkpoints and in the log."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RunRecord:
    """What the run knows of its own past, over all its segments; a resumed run goes on with it."""

    history: list[dict[str, Any]] = field(default_factory=list)
    saves: list[int] = field(default_factory=list)  # slots at which all ranks met for a checkpoint
    stop_rounds: list[int] = field(default_factory=list)  # rounds of a local policy after which a stop was saved
    segments: list[dict[str, Any]] = field(default_factory=list)  # where the run began and was resumed, on what
    earlier_logs: list[dict[str, Any]] = field(default_factory=list)  # of ranks of earlier segments that are gone
    generations: list[dict[str, Any]] = field(default_factory=list)  # those that are over, with what each rank trained
    # By member: what it had trained before the run was resumed. When the member is lost, it goes to `earlier_logs`.
    resumed_logs: dict[str, dict[str, Any]] = field(default_factory=dict)
    lost_logs: list[dict[str, Any]] = field(default_factory=list)  # of members of `generations` that are gone
    member: str | None = None  # the member that keeps this record, where ranks may be lost or join
    train_seconds: float = 0.0  # of earlier segments
    kept: tuple[dict[str, Any], dict[str, Any]] | None = None  # tensors that a callback kept, and their entry
    monitored: str | None = None  # the metric that keep_best or a ReduceLROnPlateau follows, once it was evaluated
    user: dict[str, Any] = field(default_factory=dict)  # what the user's own loop registered
