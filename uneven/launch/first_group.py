"""The first group of a run: all ranks compare settings, data and model, then form it. Called by launch/context.py."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from uneven.comm.form import form_group
from uneven.comm.group import Group
from uneven.config import RunConfig
from uneven.launch.checks.parity import check_agreement
from uneven.launch.environment import LaunchEnvironment
from uneven.launch.membership import form_ranks
from uneven.train.rank_info import RankInfo


def form_first_group(
    environment: LaunchEnvironment,
    run: int,
    rank_info: RankInfo,
    model: nn.Module,
    config: RunConfig | None,
    data: Sequence[str],
    say: Callable[[Sequence[str]], None],
    is_crowded: bool,
) -> Group:
    """Of the script's run of this number; without `config` the model is trained by hand, through host memory."""
    store = environment.connect(f"run/{run}")
    rank, world_size, machines = rank_info.rank, rank_info.world_size, rank_info.roster.machines
    check_agreement(store, rank_info, model, config, data, say)
    if config is None:
        device = next((param.device for param in model.parameters()), torch.device("cpu"))
        return form_group(store, rank, world_size, device, "cpu", is_crowded=False, machines=machines)
    return form_ranks(store, rank_info.roster, rank, config, is_crowded)
