"""Shared by all tests: a cuda test without a GPU is skipped with its reason, never passed silently."""

import faulthandler
import gc
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path

# As many tests run at once as there are cores: threads of torch would only wait for each other, in this process and
# in those that tests start. It is read when torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch looks up a name for the address of every connection. Where the name server does not answer, or not so many
# questions at once, each of them would wait for 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Whatever build of torch this user has made active: tests are about the environment they run in.
os.environ["UNEVEN_TORCH"] = "none"

# A shell ignores Ctrl-C for what it runs in the background, and so would all processes that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from hypothesis import HealthCheck, settings

from tests import forked
from uneven.errors import MachineError

# How long an example takes is the machine's affair: on a busy one no test fails for it. `make soak` draws more of them.
settings.register_profile("soak", max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("short", settings.get_profile("soak"), max_examples=40)
settings.load_profile("short")

# Files run whole, one after the other in each process of pytest. Those that take longest go first: a long one that
# comes last would keep one core busy while the other has nothing to do.
LONGEST = (
    "api/test_entry_points.py",
    "launch/test_rank_processes.py",
    "test_readme.py",
    "faults/test_storm.py",
    "train/test_resume.py",
    "train/test_local_sgd.py",
    "train/test_apply_strategy.py",
    "train/test_local_sgd_processes.py",
    "launch/test_resume_kills.py",
    "parallel/test_strategies.py",
    "parallel/test_strategy_processes.py",
    "policy/test_slot_schedule.py",
    "bench/test_modes.py",
    "bench/strategies/test_strategies.py",
    "parallel/test_tensor_parallel.py",
    "bench/test_efficiency.py",
    "train/test_gradient_sync.py",
    "graph/test_graph.py",
    "timeline/test_page.py",
    "bench/models/test_resnet_graph.py",
    "cli/test_demo.py",
    "data/test_feed.py",
    "api/test_twins.py",
    "api/test_examples.py",
    "launch/test_signal_processes.py",
    "policy/test_exact.py",
    "launch/test_slices.py",
    "bench/single/test_run.py",
    "bench/models/test_models.py",
    "timeline/test_page_browser.py",
    "train/test_segment.py",
    "train/elastic/test_settle.py",
    "cli/test_exit_codes.py",
    "network/test_join.py",
    "network/test_launchers.py",
    "launch/checks/test_resume_ranks.py",
    "api/test_loop_resume.py",
    "test_shape.py",
    "cli/test_bench.py",
    "cli/test_data.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """A process of pytest that crashes ends the run with the test's name.

    xdist would start another for it, which runs the same test again, up to four times per process; and where the other
    processes had nothing left to do, it waits for ever.
    """
    if getattr(config.option, "maxworkerrestart", "no xdist") is None:
        config.option.maxworkerrestart = "0"


def _place(item: pytest.Item) -> int:
    name = item.path.relative_to(Path(__file__).parent).as_posix()
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What torch and the modules of tests make lives to the end: a collection of all of it is half a second each."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Not at the top: the process that only hands out tests imports it, too, before it starts the others.
    import torch

    items.sort(key=_place)
    if torch.cuda.is_available():
        return
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=f"no CUDA device (torch {torch.__version__})"))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[None]:
    return (yield from _skipped_without_muon())


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup() -> Iterator[None]:
    return (yield from _skipped_without_muon())


def _skipped_without_muon() -> Iterator[None]:
    """torch.optim.Muon came with torch 2.9; what needs it is skipped where it is not."""
    try:
        return (yield)
    except (MachineError, AttributeError, ImportError) as error:
        import torch  # not at the top, see above

        if hasattr(torch.optim, "Muon") or "muon" not in str(error).lower():
            raise
        pytest.skip(str(error))


@pytest.fixture(autouse=True, scope="session")
def _processes_are_forked() -> Iterator[None]:
    """From one warmed-up server per process of pytest: see tests/forked.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", forked.PackagePopen)
        yield
    forked.close_server()


@pytest.fixture(autouse=True, scope="session")
def _runs_are_remembered_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Not in the home of whoever runs the tests (launch/control/known_runs.py)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True, scope="session")
def _runs_of_the_user_stay() -> Iterator[None]:
    """Tests write below tmp_path: what was trained in the checkout is as it was, and nothing is added to it."""
    before = _runs_in_the_checkout()
    yield
    after = _runs_in_the_checkout()
    changed = sorted(str(path) for path in {*before, *after} if before.get(path) != after.get(path))
    assert not changed, f"a test, or a run meanwhile, has changed {', '.join(changed[:5])}"


def _runs_in_the_checkout() -> dict[Path, int]:
    runs = Path(__file__).parent.parent / "runs"
    return {path: path.stat().st_mtime_ns for path in runs.rglob("*") if path.is_file()}


@pytest.fixture(autouse=True)
def _some_are_started_for_real(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if {"real_start", "cuda", "soak"} & set(request.node.keywords):
        monkeypatch.setattr(subprocess, "Popen", forked.RealPopen)


@pytest.fixture(autouse=True)
def _pages_only_where_a_test_looks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page takes most of a second, and a hundred tests have a run with a folder."""
    if "timeline.html" not in _text_of(request.node.path):
        monkeypatch.setenv("UNEVEN_PAGES", "0")


@cache
def _text_of(path: Path) -> str:
    return path.read_text() if path.suffix == ".py" else ""


@pytest.fixture(autouse=True)
def _long_ones_have_limits_of_their_own(request: pytest.FixtureRequest) -> None:
    """faulthandler_timeout is for the default suite."""
    if {"soak", "grid"} & set(request.node.keywords):
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def _no_thread_left_behind() -> Iterator[None]:
    """A run that ended, well or badly, has stopped its sampler: a test that leaks one fails."""
    before = set(threading.enumerate())
    yield
    left = [thread.name for thread in set(threading.enumerate()) - before if thread.name == "uneven-sampler"]
    assert not left, "a sampler outlived its run"
