"""Whether a rank that joins a run fits it, before it is in a roster: against a real store, its worker is made here."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import Silent
from uneven.comm.fingerprint import describe_tensors
from uneven.comm.store import open_store, under
from uneven.config import RunConfig, Task
from uneven.errors import RefusedError
from uneven.hardware.device import parse_devices
from uneven.hardware.roster import Roster
from uneven.launch.checks.parity import describe_order
from uneven.launch.environment import LaunchEnvironment
from uneven.launch.newcomer import RUN, check_newcomer, describe_run, facts_key
from uneven.train.rank_info import RankInfo
from uneven.train.requests import Requests
from uneven.train.worker import Worker

DEVICES = parse_devices("cpu,cpu,cpu")
TWO_MACHINES = Roster(DEVICES, (0, 0, 1), ("lead", "laptop"))


def make_worker(rank: int, values: float = 1.0, *, width: int = 1, skip: str | None = None, samples: int = 8) -> Worker:
    task = Task(
        lambda: nn.Linear(4, width),
        lambda params: torch.optim.SGD(params, lr=0.1),
        lambda model, batch: model(batch).sum(),
        torch.full((samples, 4), values),
    )
    config = RunConfig(batch_size=4, epochs=1, skip=skip)
    info = RankInfo(rank, DEVICES, roster=TWO_MACHINES, member=f"pc/cpu/{rank}")
    return Worker(task, config, info, lambda _: None, Requests(), Silent())  # type: ignore[arg-type,return-value]


class Leading:
    """The store of a run that is on, with what its rank 0 has told."""

    def __init__(self) -> None:
        self.store, port = open_store()
        self.environment = LaunchEnvironment(
            "uneven run", 0, 3, 0, 2, host="127.0.0.1", port=port, member="lead", door=("127.0.0.1", 1, "token")
        )

    def begin(self, worker: Worker) -> dict[str, Any]:
        facts = describe_run(self.environment, RUN, worker, 0)
        self.store.set(facts_key(RUN), json.dumps(facts))
        known, model = under(f"run/{RUN}", self.store), worker.engine.model
        known.set("fingerprint/settings/0", json.dumps(describe_order(worker)))
        tensors = describe_tensors([*model.named_parameters(), *model.named_buffers()])
        known.set("fingerprint/model/0", json.dumps(tensors))
        return facts


@pytest.fixture
def leading() -> Iterator[Leading]:
    made = Leading()
    yield made
    del made.store


def test_other_values_of_the_same_number_of_samples_are_refused_as_at_the_start(leading: Leading) -> None:
    """Such a machine trained on its own data, and nobody was told."""
    leading.begin(make_worker(0))
    check_newcomer(leading.environment, make_worker(2))
    with pytest.raises(RefusedError, match=r"^laptop: .* of the data set .*copy the leader's data there"):
        check_newcomer(leading.environment, make_worker(2, 2.0))
    with pytest.raises(RefusedError, match="laptop: the length of the data set is 12, the leader's is 8"):
        check_newcomer(leading.environment, make_worker(2, samples=12))


def test_data_is_not_read_where_nobody_compares_it(leading: Leading) -> None:
    """A rank that is started again reads the same files as the others of its machine."""
    assert "data" not in leading.begin(make_worker(0, skip="data"))
    check_newcomer(leading.environment, make_worker(2, 2.0))
    assert "data" in leading.begin(make_worker(0))
    check_newcomer(leading.environment, make_worker(1, 2.0))
    assert "data" not in describe_run(leading.environment, RUN, make_worker(1), 0)
    assert "data" not in describe_run(leading.environment, RUN + 1, make_worker(0), 0)


def test_another_model_is_refused(leading: Leading) -> None:
    leading.begin(make_worker(0))
    with pytest.raises(
        RefusedError,
        match=r"^laptop: the rank that joins built another model than rank 0 on the leader: 'weight \(2, 4\)",
    ):
        check_newcomer(leading.environment, make_worker(2, width=2))
