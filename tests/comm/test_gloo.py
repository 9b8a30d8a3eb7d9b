"""What Gloo writes to stdout goes to stderr while a group is formed, and nothing else for longer."""

import os
import sys
import threading

import pytest

from tests.forked import run_forked
from uneven.comm import gloo
from uneven.comm.gloo import gloo_to_stderr


@pytest.fixture(autouse=True)
def writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "WRITES", True)


def test_the_descriptor_is_put_back(capfd: pytest.CaptureFixture[str]) -> None:
    for number in range(3):
        with gloo_to_stderr():
            os.write(1, b"connected %d\n" % number)
        os.write(1, b"step %d\n" % number)
    assert capfd.readouterr() == ("step 0\nstep 1\nstep 2\n", "connected 0\nconnected 1\nconnected 2\n")


def test_also_after_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError), gloo_to_stderr():
        raise RuntimeError
    os.write(1, b"step\n")
    assert capfd.readouterr().out == "step\n"


def test_the_last_of_several_threads_puts_it_back(capfd: pytest.CaptureFixture[str]) -> None:
    inside, may_leave = threading.Event(), threading.Event()

    def form() -> None:
        with gloo_to_stderr():
            inside.set()
            assert may_leave.wait(30)

    thread = threading.Thread(target=form)
    with gloo_to_stderr():
        thread.start()
        assert inside.wait(30)
    os.write(1, b"connected\n")  # by the thread that is still inside
    may_leave.set()
    thread.join()
    os.write(1, b"step\n")
    assert capfd.readouterr() == ("step\n", "connected\n")


@pytest.mark.parametrize("closed", [(1,), (2,), (1, 2)])
def test_a_process_without_these_descriptors(closed: tuple[int, ...]) -> None:
    code = (
        f"import os; [os.close(fd) for fd in {closed}]\n"
        "from uneven.comm import gloo as g; g.WRITES = True\n"
        "with g.gloo_to_stderr(): pass\n"
        "os._exit(7)"
    )
    assert run_forked([sys.executable, "-c", code]).returncode == 7
