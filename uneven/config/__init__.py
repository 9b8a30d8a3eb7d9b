"""What a run trains (Task) and how (RunConfig): the names other rooms import. Neither torch nor numpy."""

from uneven.config.arguments import check_evaluate
from uneven.config.resolve import check_settings, resolve
from uneven.config.run_config import (
    CHOICES,
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
    LRScale,
    OptimizerState,
    Policy,
    Precision,
    Progress,
    RunConfig,
    Strategy,
)
from uneven.config.setting import Setting, settings_of
from uneven.config.task import EvalStep, Evaluation, Loading, Task, TrainStep, check_task

__all__ = [
    "CHOICES",
    "EXACT_POLICIES",
    "LOCAL_POLICIES",
    "MODEL_PARALLEL",
    "POLICIES",
    "REPLICATED",
    "SHARDED",
    "STRATEGIES",
    "Activations",
    "Backend",
    "Compile",
    "EvalStep",
    "Evaluation",
    "LRScale",
    "Loading",
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
    "check_settings",
    "check_task",
    "resolve",
    "settings_of",
]
