"""The host waits for its device's compute stream, and only where it must."""

import pytest
import torch

from uneven.step.runahead import DEPTH, RunAhead


def test_on_cpu_a_step_is_done_when_it_returns() -> None:
    run_ahead = RunAhead(torch.device("cpu"))
    for _ in range(5):
        run_ahead.after_step()
    run_ahead.catch_up()
    run_ahead.drain()


@pytest.mark.cuda
def test_catching_up_does_not_wait_for_other_streams() -> None:
    run_ahead = RunAhead(torch.device("cuda", 0))
    torch.cuda.synchronize()
    own, others = torch.cuda.Event(), torch.cuda.Event()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(2_000_000_000)  # about a second, as a collective that waits for a rank
        others.record()
    torch.cuda._sleep(50_000_000)
    own.record()
    run_ahead.catch_up()
    assert own.query()
    assert not others.query()
    run_ahead.drain()
    assert others.query()


@pytest.mark.cuda
def test_the_host_is_only_a_few_steps_ahead() -> None:
    run_ahead = RunAhead(torch.device("cuda", 0))
    steps = [torch.cuda.Event() for _ in range(5)]
    for step in steps:
        torch.cuda._sleep(20_000_000)
        step.record()
        run_ahead.after_step()
    assert all(step.query() for step in steps[:-DEPTH])
    run_ahead.drain()
