"""Before a group forms: all ranks have the same settings, data and model, or all of them refuse."""

from collections.abc import Callable, Sequence

from torch import nn

from uneven.comm.fingerprint import agree, describe_tensors, exchange
from uneven.comm.store import Store
from uneven.config import RunConfig
from uneven.launch.checks.parity import describe_initial, initial_norms
from uneven.train.rank_info import RankInfo
from uneven.train.worker import Worker

# Settings that may differ between ranks: only the first rank writes and prints, and the folders that others read may
# have other paths on other machines; what is in them is compared (launch/checks/resume.py `content_lines`).
PER_RANK_SETTINGS = ("out", "overwrite", "progress", "resume", "replay")


def check_agreement(
    store: Store,
    rank_info: RankInfo,
    model: nn.Module,
    config: RunConfig | None,
    data: Sequence[str],
    say: Callable[[Sequence[str]], None],
) -> None:
    """InputError on every rank where settings, `data` (lines that describe it) or the model's tensors differ.

    Initial values may differ, since rank 0's are taken; over machines `say` then prints that they do.
    """
    rank, world_size, roster = rank_info.rank, rank_info.world_size, rank_info.roster
    lines = list(data)
    given = {} if config is None else config.to_json()
    lines += [f"{name} = {value}" for name, value in given.items() if name not in PER_RANK_SETTINGS]
    named = [*model.named_parameters(), *model.named_buffers()]
    hosts = () if roster.is_one_machine else [roster.host(other) for other in range(world_size)]
    agree(store, rank, world_size, lines, what="was given other settings", where="settings", hosts=hosts)
    agree(store, rank, world_size, describe_tensors(named), hosts=hosts)
    if hosts:
        norms = exchange(store, "initial", rank, range(world_size), initial_norms(named))
        say(describe_initial(norms, roster) if rank == 0 else ())


def describe_data(worker: Worker) -> list[str]:
    """Lines about the data that are the same on all ranks."""
    axis, order = worker.engine.axis, worker.engine.order
    return [f"samples = {axis.samples}", f"order of samples = {order.fingerprint(worker.config.epochs):08x}"]
