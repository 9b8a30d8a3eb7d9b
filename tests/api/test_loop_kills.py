"""A loop of the user's own loses a rank that is really killed, or raises, and goes on; on threads: test_loop_losses.py.

Rank 1 ends itself at a place of the script's own. It waits there until the launcher knows that the others can go on.
"""

import sys
from pathlib import Path

import pytest

from tests.api.starts import HEAD, assert_close, start
from uneven import TrainedState

SCRIPT = (
    HEAD
    + """
import os, signal, time

how, place, first = sys.argv[1], sys.argv[2], int(sys.argv[3])
began_s = time.monotonic()

def end(where, epoch):
    if where == place and ddp.rank == 1 and ddp.world_size == 3 and epoch >= first:
        time.sleep(max(0.0, 1.5 - (time.monotonic() - began_s)))  # heartbeats
        if how == "raise":
            raise ValueError("out of luck")
        os.kill(os.getpid(), signal.SIGKILL)

def right(model, batch):
    end("evaluation", 1)
    return {"right": (model(batch[0]).argmax(1) == batch[1]).sum().double()}, len(batch[1])

def plateau(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)

ddp = Ddp.setup(net(), sgd, dataset=TensorData(X, Y), batch_size=10, epochs=3, seed=3, out="out", policy="sync",
                evaluate=(TensorData(X, Y), right), scheduler=plateau)
batches = 0
for epoch in range(ddp.epochs):
    for x, y in ddp.batches(epoch):
        batches += 1
        end("forward", epoch)
        loss = F.cross_entropy(ddp(x), y)
        if place == "backward":
            loss.register_hook(lambda _: end("backward", epoch))
        ddp.step(loss)
        end("step", epoch)
    end("between", epoch)
    ddp.scheduler_step(1.0)
    end("called", epoch)
state = ddp.finish()
if ddp.rank == 0:
    print("ENDED", json.dumps([len(one["devices"]) for one in state.segments]), state.samples, batches)
"""
)


def run(folder: Path, *arguments: str) -> tuple[TrainedState, str]:
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    done = start([sys.executable, "-m", "uneven", "run", *arguments], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return TrainedState.load(folder / "out"), done.stdout + done.stderr


def lose(folder: Path, policy: str, how: str, place: str) -> TrainedState:
    """Of three ranks; each sample once, or its state would be refused."""
    # A slow rank of a local policy has perhaps no other batch than its first.
    first = "0" if policy in ("cadence", "async") else "1"
    options = ("--devices", "cpu,cpu,cpu", "--policy", policy, "train.py", how, place, first)
    state, said = run(folder / f"{policy}-{how}-{place}", *options)
    assert "rank 1 (cpu on" in said
    assert ("failed: ValueError: out of luck" if how == "raise" else "was ended by SIGKILL") in said
    assert "ENDED [3, 2] 450 " in said
    assert state.finished
    return state


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> TrainedState:
    options = ("--devices", "cpu", "--batch-size", "30", "train.py", "", "", "1")
    return run(tmp_path_factory.mktemp("one") / "alone", *options)[0]


def test_a_rank_is_killed_in_backward_and_the_loop_goes_on_as_by_one_process(
    tmp_path: Path, alone: TrainedState
) -> None:
    assert_close(lose(tmp_path, "sync", "kill", "backward").params, alone.params)


def test_a_rank_of_async_is_killed_and_the_loop_goes_on(tmp_path: Path) -> None:
    lose(tmp_path, "async", "kill", "forward")


PLACES = ("forward", "backward", "step", "evaluation", "between", "called")


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["kill", "raise"])
@pytest.mark.parametrize("policy", ["sync", "balanced"])
def test_a_rank_is_lost_at_any_place_of_the_users_code(
    tmp_path: Path, policy: str, how: str, alone: TrainedState
) -> None:
    for place in PLACES:
        assert_close(lose(tmp_path, policy, how, place).params, alone.params)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_rank_of_a_local_policy_is_lost_at_any_place_of_the_users_code(tmp_path: Path, policy: str) -> None:
    for place in PLACES:
        lose(tmp_path, policy, "kill", place)


JOINED = (
    HEAD
    + """
import os, signal, time
from uneven import Callback

is_newcomer = Path("killed").exists()

class Enough(Callback):
    def on_step(self, info):
        if info.rank == 0 and Path("joined").exists():
            info.stop("enough")

ddp = Ddp.setup(net(), sgd, dataset=TensorData(X, Y), batch_size=10, epochs=2000, seed=3, out="out", policy="sync",
                callbacks=[Enough()], max_steps=int(sys.argv[1]) or None, progress="off")
began_s, asked = time.monotonic(), 0
for epoch in range(ddp.epochs):
    for x, y in ddp.batches(epoch):
        time.sleep(0.01)
        if is_newcomer and epoch > asked:
            asked = epoch
            print("NEWCOMER", ddp.global_step, flush=True)
        ddp.step(F.cross_entropy(ddp(x), y))
        if ddp.rank == 1 and not is_newcomer and time.monotonic() - began_s > 1.5:
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    ddp.log(passed=float(epoch))
    if is_newcomer and asked:
        Path("joined").touch()
state = ddp.finish()
if ddp.rank == 0:
    print("ENDED", json.dumps([len(one["devices"]) for one in state.segments]), state.slot, state.samples)
"""
)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", ["sync", "balanced", "cadence", "async"])
def test_a_killed_rank_is_started_again_and_joins_the_loop_at_an_epochs_start(tmp_path: Path, policy: str) -> None:
    (tmp_path / "train.py").write_text(JOINED)
    command = [sys.executable, "-m", "uneven", "run", "--devices", "cpu,cpu", "--policy", policy, "--restarts", "1"]
    done = start([*command, "train.py", "0"], tmp_path)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "ENDED [2, 1, 2] " in said
    assert "joins: 2 ranks go on" in said
    first = int(said.partition("NEWCOMER ")[2].split()[0])
    assert policy in ("cadence", "async") or first % 8 == 0, "at an epoch's start"
    if policy == "sync":
        slots = said.partition("ENDED [2, 1, 2] ")[2].split()[0]
        joined = TrainedState.load(tmp_path / "out")
        (tmp_path / "out").rename(tmp_path / "joined-out")
        (tmp_path / "joined").unlink()
        (tmp_path / "killed").unlink()
        one = [sys.executable, "-m", "uneven", "run", "--devices", "cpu", "--batch-size", "20"]
        alone = start([*one, "train.py", slots], tmp_path)
        assert alone.returncode == 0, alone.stdout + alone.stderr
        assert_close(joined.params, TrainedState.load(tmp_path / "out").params)
