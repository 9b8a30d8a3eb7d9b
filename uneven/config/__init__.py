"""What a run trains (Task) and how (RunConfig): the names other rooms import. Neither torch nor numpy."""

from uneven.config.names import (
    ENTRY_KEYS,
    EXACT_POLICIES,
    LOCAL_POLICIES,
    MODEL_PARALLEL,
    POLICIES,
    REPLICATED,
    SHARDED,
    STRATEGIES,
    Precision,
    results_of,
)
from uneven.config.run_config import RunConfig
from uneven.config.setting import Setting, settings_of
from uneven.config.sources import (
    check_settings,
    resolve,
)
from uneven.config.task import (
    HOOKS,
    EvalStep,
    Evaluation,
    Loading,
    Task,
    TrainStep,
    check_evaluate,
    check_evaluation,
    check_list,
    check_task,
    is_stream,
)
from uneven.config.text import Every, read_every

__all__ = [
    "ENTRY_KEYS",
    "EXACT_POLICIES",
    "HOOKS",
    "LOCAL_POLICIES",
    "MODEL_PARALLEL",
    "POLICIES",
    "REPLICATED",
    "SHARDED",
    "STRATEGIES",
    "EvalStep",
    "Evaluation",
    "Every",
    "Loading",
    "Precision",
    "RunConfig",
    "Setting",
    "Task",
    "TrainStep",
    "check_evaluate",
    "check_evaluation",
    "check_list",
    "check_settings",
    "check_task",
    "is_stream",
    "read_every",
    "resolve",
    "results_of",
    "settings_of",
]
