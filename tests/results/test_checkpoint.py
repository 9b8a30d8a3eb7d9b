"""The format of checkpoints: bit by bit, verified, whole at every moment; which are found, and which may go."""

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.results.checkpoints import RECORD, flip_byte, make_part, make_whole, write_checkpoint
from uneven import InputError, TrainedState
from uneven.files import partial_folder
from uneven.results import checkpoint as module
from uneven.results.checkpoint import read_checkpoint, seal, write_rank_part
from uneven.results.checkpoint_folders import find_checkpoints, first_whole, prune, remove_partial
from uneven.results.record import encode, read_record
from uneven.results.tensor_file import open_tensors, write_tensors


def test_every_kind_of_tensor_is_read_back_bit_by_bit(tmp_path: Path) -> None:
    floats = torch.tensor([[1.5, float("nan"), -0.0], [float("inf"), 1e-40, -3.25]])
    tensors = {
        **{str(kind): floats.to(kind) for kind in (torch.float64, torch.float32, torch.float16, torch.bfloat16)},
        **{
            str(kind): torch.tensor([0, 1, 127]).to(kind)
            for kind in (torch.int64, torch.int32, torch.int8, torch.uint8)
        },
        "bool": torch.tensor([True, False, True]),
        "single": torch.tensor(3.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "transposed": floats.t(),
        "strided": torch.arange(20).view(4, 5)[1::2, ::3],
        "channels_last": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "expanded": torch.tensor([2.0]).expand(3),
        "param": torch.nn.Parameter(torch.rand(3)),
        "large": torch.arange(400_000),  # several pieces
        'odd "name" \u00e9\n': torch.ones(1),
    }
    path = tmp_path / "x.safetensors"
    found_sums = write_tensors(path, tensors)
    assert found_sums.length == path.stat().st_size
    for found in (open_tensors(path, "x"), safetensors.torch.load_file(path)):
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
            ours, theirs = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (found[name], tensor))
            assert torch.equal(ours, theirs), name
    write_tensors(path, {})
    assert dict(open_tensors(path, "x")) == {}


def test_a_type_without_a_place_in_the_format_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^wave is of torch.complex128, which"):
        write_tensors(tmp_path / "x", {"wave": torch.zeros(1, dtype=torch.complex128)})


def test_a_checkpoint_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "step-4", best=True)
    found, whole = read_checkpoint(folder), make_whole(best=True)
    assert os.listdir(tmp_path) == ["step-4"]
    assert sorted(os.listdir(folder)) == sorted([*found.record["files"], "state.json"])
    assert {key: found.record[key] for key in RECORD} == RECORD
    assert [found.record[key] for key in ("version", "kind", "world_size")] == [2, "checkpoint", 2]
    assert found.record["versions"]["torch"] == torch.__version__
    assert found.record == read_record(folder)
    assert [part.record for part in found.ranks] == [make_part(rank).record for rank in range(2)]
    (folder / "rank-1.safetensors").unlink()  # open already: a resumed run may prune what it came from
    for tensors, expected in (
        (found.tensors, whole.tensors),
        (found.best, whole.best),
        *((found.ranks[rank].tensors, make_part(rank).tensors) for rank in range(2)),
    ):
        assert tensors is not None
        assert expected is not None
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert "nothing" not in found.tensors


def test_a_long_log_is_encoded_in_slices_to_the_same_json() -> None:
    record = {"log": [[slot, 0, 4] for slot in range(2500)], "empty": [], "nan": float("inf"), "text": "\u00e9\n"}
    found = json.loads(encode(record))
    assert {key: found[key] for key in record} == record


def test_one_flipped_byte_in_any_file_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "step-4", best=True)
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for place in {0, 3, len(content) // 3, len(content) // 2, len(content) - 3}:
            flip_byte(path, place)
            with pytest.raises(InputError, match=rf"^checkpoint {folder}: {path.name} (is|has)") as caught:
                read_checkpoint(folder)
            assert "\n" not in str(caught.value)
            path.write_bytes(content)
    read_checkpoint(folder)


def test_what_is_missing_or_cut_off_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "step-4")
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(InputError, match=rf"^checkpoint {folder}: {path.name} is missing"):
            read_checkpoint(folder)
        for length in (0, len(content) - 4):
            path.write_bytes(content[:length])
            with pytest.raises(InputError, match=rf"^checkpoint {folder}: {path.name} is damaged: .+") as caught:
                read_checkpoint(folder)
            assert "\n" not in str(caught.value)
        path.write_bytes(content)
    (folder / "state.json").write_text("[]")
    with pytest.raises(InputError, match=r"state\.json is not the record of a run"):
        read_checkpoint(folder)
    with pytest.raises(InputError, match=r"absent: state\.json is missing"):
        read_checkpoint(tmp_path / "absent")


def test_another_version_says_which_uneven_wrote_it(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "step-4")
    record = read_record(folder)
    (folder / "state.json").write_bytes(encode({**record, "version": 3, "versions": {"uneven": "9.1"}}))
    with pytest.raises(InputError, match=r"step-4: state.json has version 3 .* written by uneven 9\.1; this is uneven"):
        read_checkpoint(folder)
    (folder / "state.json").write_bytes(encode({**record, "kind": "result"}))
    with pytest.raises(InputError, match="is the result of a run, not a checkpoint"):
        read_checkpoint(folder)


def test_a_checkpoint_loads_as_a_trained_state(tmp_path: Path) -> None:
    state = TrainedState.load(write_checkpoint(tmp_path / "step-4", best=True))
    assert list(state.params) == ["layer.weight", "layer.bias"]
    assert list(state.buffers) == ["norm.mean"]
    names = ["layer.weight.count", "layer.weight.exp_avg", "layer.weight.step", "random.cpu"]
    assert sorted(state.optimizer) == names
    assert state.optimizer["layer.weight.count"] == 3
    assert (state.slot, state.samples, state.finished, state.best) == (4, 32, False, None)
    flip_byte(tmp_path / "step-4" / "rank-1.json", 9)
    with pytest.raises(InputError, match=r"^state .*step-4: rank-1\.json is damaged"):
        TrainedState.load(tmp_path / "step-4")


def test_the_newest_whole_one_is_taken_and_damaged_ones_are_told(tmp_path: Path) -> None:
    assert find_checkpoints(tmp_path / "absent") == []
    for name, slot in (("step-10", 10), ("epoch-1", 8), ("step-9", 9), ("epoch-2", 16)):
        write_checkpoint(tmp_path / name, slot)
    TrainedState({}, {}).save(tmp_path / "epoch-9")  # a result, whatever its name
    (tmp_path / "notes").mkdir()
    write_checkpoint(tmp_path / ".step-99.partial-word", 99)
    names = ["epoch-2", "step-10", "step-9", "epoch-1"]
    assert [folder.name for folder in find_checkpoints(tmp_path)] == names
    (tmp_path / "epoch-2" / "state.json").unlink()
    content = (tmp_path / "step-10" / "state.json").read_bytes()
    (tmp_path / "step-10" / "state.json").write_bytes(content[: len(content) // 2 + 200])
    flip_byte(tmp_path / "epoch-1" / "rank-0.json", 9)
    assert [folder.name for folder in find_checkpoints(tmp_path)] == names
    found, told = first_whole(find_checkpoints(tmp_path), read_checkpoint)
    assert found is not None
    assert found.folder == tmp_path / "step-9"
    assert [re.sub(r".*/", "", line.split(": ")[0]) for line in told] == ["epoch-2", "step-10"]
    flip_byte(tmp_path / "step-9" / "state.safetensors", -1)
    found, told = first_whole(find_checkpoints(tmp_path), read_checkpoint)
    assert (found, len(told)) == (None, 4)


def test_a_rank_reads_and_verifies_what_it_goes_on_from(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "step-4")
    for rank in (0, 1):
        found = read_checkpoint(folder, rank)
        assert [bool(part.tensors) for part in found.ranks] == [True, rank == 1]
        assert [part.record for part in found.ranks] == [part.record for part in read_checkpoint(folder).ranks]
    flip_byte(folder / "rank-1.safetensors", -1)
    read_checkpoint(folder, 0)
    for rank_or_all in (1, None):
        with pytest.raises(InputError, match=r"rank-1\.safetensors is damaged"):
            read_checkpoint(folder, rank_or_all)


def test_a_checkpoint_itself_is_the_only_candidate(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "step-4")
    assert find_checkpoints(folder) == [folder]
    (folder / "state.json").unlink()
    assert find_checkpoints(folder) == [folder]
    with pytest.raises(InputError, match=r"state\.json is missing"):
        read_checkpoint(folder)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_prune_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    losses = [0.5, 0.2, 0.9, float("nan"), 0.4, 0.6]
    for number in range(1, 7):
        history = [{"epoch": n, "loss": loss} for n, loss in enumerate(losses[:number], 1)]
        write_checkpoint(tmp_path / f"epoch-{number}", 10 * number, 1, history=history)
    write_checkpoint(tmp_path / "step-25", 25, 1, history=[{"loss": 0.5}, {"loss": 0.2}])  # epoch-2's evaluation
    (tmp_path / "epoch-3" / "rank-0.json").unlink()
    for number in (1, 2, 3, 4, 5):
        os.utime(tmp_path / f"epoch-{number}" / "state.json", (number, number))
    os.utime(tmp_path / "step-25" / "state.json", (25, 25))
    assert prune(tmp_path, None, None, None, "min") == []
    assert prune(tmp_path, 99, None, None, "min") == []
    removed = prune(tmp_path, 1, 2, "loss", "min")
    assert sorted(path.name for path in removed) == ["epoch-1", "epoch-4", "step-25"]
    assert names_in(tmp_path) == ["epoch-2", "epoch-3", "epoch-5", "epoch-6"]  # epoch-3 is damaged and left alone
    prune(tmp_path, 0, 1, "loss", "max")
    assert names_in(tmp_path) == ["epoch-3", "epoch-6"]
    write_checkpoint(tmp_path / "step-40", 40, 1)  # resumed from an older one: written last, and behind epoch-6
    prune(tmp_path, 1, None, None, "min")
    assert names_in(tmp_path) == ["epoch-3", "epoch-6", "step-40"]


def test_what_killed_runs_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in (".step-4.partial-a_0", ".epoch-1.removed-b", ".step-8.old-c", ".step-12.old-d", ".state.partial-e"):
        write_checkpoint(tmp_path / name, ranks=1)
    write_checkpoint(tmp_path / "step-8", 8, 1)
    (tmp_path / ".step-4.failed-a_0").touch()
    (tmp_path / ".git.partial-x").mkdir()
    assert [path.name for path in find_checkpoints(tmp_path)] == ["step-8", ".step-12.old-d"]
    remove_partial(tmp_path)
    assert names_in(tmp_path) == [".git.partial-x", "step-12", "step-8"]
    assert remove_partial(tmp_path / "absent") == []


def file_operations(dies_at: int) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook that kills the process before the Nth time that it changes something in the run's folder."""
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        is_change = event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir")
        if is_change or (event == "open" and arguments[2] & os.O_CREAT):
            count += any("run-" in str(argument) for argument in arguments[:2])
            if count == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)

    return hook


def replace_and_prune(run: Path) -> None:
    """What a child process is killed in: step-4 is replaced by a new one, step-8 comes, and step-4 goes."""
    write_checkpoint(run / "step-4", 4, 1, cause="new")
    write_checkpoint(run / "step-8", 8, 1)
    prune(run, 1, None, None, "min")


def test_a_kill_at_any_file_operation_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # processes die here, not the machine
    seen, runs = set(), 0
    for dies_at in range(1, 200):
        run = tmp_path / f"run-{dies_at}"
        write_checkpoint(run / "step-4", 4, 1, cause="old")
        child = os.fork()
        if child == 0:
            try:
                sys.addaudithook(file_operations(dies_at))
                replace_and_prune(run)
                os._exit(0)
            finally:
                os._exit(1)  # the rest of pytest is the parent's
        _, status = os.waitpid(child, 0)
        assert status in (0, signal.SIGKILL)
        found = [read_checkpoint(folder) for folder in find_checkpoints(run)]  # older ones too: none is half removed
        assert found, f"killed before operation {dies_at}"
        seen.add((found[0].record["slot"], found[0].record["cause"]))
        remove_partial(run)
        assert read_checkpoint(find_checkpoints(run)[0]).record == found[0].record
        assert not any(name.startswith(".") for name in names_in(run))
        runs += 1
        if status == 0:
            break
    assert seen == {(4, "old"), (4, "new"), (8, "interval")}
    assert 15 < runs < 199
    assert names_in(run) == ["step-8"]


def test_seal_is_given_up_where_a_part_does_not_come(tmp_path: Path) -> None:
    partial = partial_folder(tmp_path / "step-4", "word")
    write_rank_part(partial, 0, make_part(0))
    looks = iter((False, False, True))
    with pytest.raises(module.SaveGivenUpError, match="rank 1 has not written its part"):
        seal(partial, tmp_path / "step-4", 2, make_whole(), lambda: next(looks))
    assert names_in(tmp_path) == [partial.name]
