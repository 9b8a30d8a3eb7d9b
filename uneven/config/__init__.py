"""What a run trains (Task) and how (RunConfig): the names other rooms import. Neither torch nor numpy."""

from uneven.config.arguments import check_evaluate
from uneven.config.every import Every, read_every
from uneven.config.names import (
    ENTRY_KEYS,
    EXACT_POLICIES,
    LOCAL_POLICIES,
    MODEL_PARALLEL,
    POLICIES,
    REPLICATED,
    SHARDED,
    STRATEGIES,
    Activations,
    Backend,
    Compile,
    Deadline,
    LRScale,
    MonitorMode,
    OptimizerState,
    Policy,
    Precision,
    Progress,
    Strategy,
    results_of,
)
from uneven.config.resolve import check_settings, resolve
from uneven.config.run_config import CHOICES, RunConfig
from uneven.config.setting import Setting, settings_of
from uneven.config.skip import SKIPPABLE, read_skip
from uneven.config.task import HOOKS, EvalStep, Evaluation, Loading, Task, TrainStep, check_list, check_task, is_stream

__all__ = [
    "CHOICES",
    "ENTRY_KEYS",
    "EXACT_POLICIES",
    "HOOKS",
    "LOCAL_POLICIES",
    "MODEL_PARALLEL",
    "POLICIES",
    "REPLICATED",
    "SHARDED",
    "SKIPPABLE",
    "STRATEGIES",
    "Activations",
    "Backend",
    "Compile",
    "Deadline",
    "EvalStep",
    "Evaluation",
    "Every",
    "LRScale",
    "Loading",
    "MonitorMode",
    "OptimizerState",
    "Policy",
    "Precision",
    "Progress",
    "RunConfig",
    "Setting",
    "Strategy",
    "Task",
    "TrainStep",
    "check_evaluate",
    "check_list",
    "check_settings",
    "check_task",
    "is_stream",
    "read_every",
    "read_skip",
    "resolve",
    "results_of",
    "settings_of",
]
