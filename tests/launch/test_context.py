"""The process context: one member per process, one run at a time, and stop requests that reach the run that is on."""

import threading
from types import SimpleNamespace

import pytest
import torch

from uneven import InputError
from uneven.hardware.device import Device
from uneven.hardware.roster import Roster
from uneven.launch.context import ProcessContext
from uneven.launch.environment import ALONE, LaunchEnvironment, new_member_id
from uneven.train.requests import Requests

MODEL = torch.nn.Linear(2, 1)


def launched() -> ProcessContext:
    return ProcessContext(LaunchEnvironment("uneven run", member="host/cpu/1"), Roster.on_one_machine([Device("cpu")]))


def test_a_member_has_an_identity_that_is_not_its_rank() -> None:
    first, second = new_member_id("cpu"), new_member_id("cpu")
    assert first != second
    assert first.split("/")[1] == "cpu"
    context = launched()
    rank_info = context.make_rank_info()
    assert (rank_info.member, rank_info.rank, rank_info.generation) == ("host/cpu/1", 0, 0)


def test_ranks_of_one_machine_reach_their_leader_in_the_way_of_machines_that_join_later() -> None:
    """Else they look for a folder in common with who joins, who asks the leader: both wait for ever."""
    environment = LaunchEnvironment("uneven run", member="host/cpu/1", door=("127.0.0.1", 1, "token"))
    context = ProcessContext(environment, Roster.on_one_machine([Device("cpu")]))
    assert context.make_rank_info().leader is context.leader is not None


def test_the_rank_is_read_from_the_run_that_is_on() -> None:
    context = launched()
    rank_info = context.make_rank_info((Device("cpu"), Device("cpu")))
    context.join(MODEL, context.make_rank_info())
    assert context.rank == 0
    context.end_run()
    rank_info.rank = 1
    context._rank_info = rank_info  # as after a change of generation
    assert context.rank == 1


def test_a_second_run_waits_until_the_first_has_ended() -> None:
    context = launched()
    context.join(MODEL, context.make_rank_info())
    with pytest.raises(InputError, match="another group of this process is still open"):
        context.join(MODEL, context.make_rank_info())
    with pytest.raises(InputError, match=r"call finish\(\) on the loop"):
        context.begin_run(Requests())
    context.end_run()
    context.begin_run(Requests())
    context.join(MODEL, context.make_rank_info())


def test_runs_of_a_process_alone_may_overlap() -> None:
    context = ProcessContext(LaunchEnvironment(ALONE))
    first, second = context.make_rank_info(), context.make_rank_info()
    for rank_info in (first, second):
        context.begin_run(Requests())
        assert context.join(MODEL, rank_info).world_size == 1
    context.end_run()
    assert first.group is not second.group


def test_a_stop_request_reaches_the_run_that_is_on_and_the_next_one() -> None:
    context, first, second = launched(), Requests(), Requests()
    context.begin_run(first)
    context.request_stop()
    assert first.stop.is_set()
    context.end_run()
    context.begin_run(second)
    assert second.stop.is_set()


@pytest.mark.parametrize("has_result", [False, True])
def test_a_rank_that_cannot_go_on_is_not_past_a_run_that_has_failed(has_result: bool) -> None:
    """The launcher read that the run had its result, went on without the lost rank, and blamed another one."""
    context = launched()
    context.begin_run(Requests())
    context.join(MODEL, context.make_rank_info())
    told = {"ends_because": "several optimizers"}
    context._worker = SimpleNamespace(
        settler=None, engine=SimpleNamespace(state=SimpleNamespace(trained=7)), show=lambda: told, has_trained=True
    )  # type: ignore[assignment]
    if has_result:
        context.close_run()
    context.leave_group()
    expected = {"is_past": True} if has_result else {"is_past": False, **told}
    assert context.ranks.show() == {"slot": 0, "phase": "setup", **expected}
    assert context.slot == 7
    context.begin_run(Requests())
    assert context.ranks.show() == {"slot": 0, "phase": "setup", "is_past": False}


def test_a_stop_request_without_a_run_interrupts_the_script() -> None:
    context = launched()

    def script() -> None:
        context.request_stop()
        threading.Event().wait(30)

    with pytest.raises(KeyboardInterrupt):
        script()
    assert context.stop_requested.is_set()
