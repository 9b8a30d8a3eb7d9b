"""Attached Trainers on two ranks: the params, losses and evaluations of one process, and what is refused.

`make test-frameworks` runs it; without transformers it is skipped.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

for package in ("transformers", "trl", "peft"):
    pytest.importorskip(package, reason="run by make test-frameworks")

from tests.api.starts import BIN, start
from tests.integrations import trainer_cases as cases
from tests.integrations.tiny_models import Endless, class_batch, params_of
from tests.ranks import on_processes
from uneven.errors import InputError
from uneven.integrations.transformers import attach

pytestmark = pytest.mark.timeout(900)  # a file imports the frameworks in three processes
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainers")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    """A plain Trainer that saves inside of an epoch."""
    return cases.dense(cases.CASES["classification"], folder / "plain", **cases.SAVES)


@pytest.fixture(scope="module")
def by_rank(folder: Path, plain: Any) -> list[dict[str, Any]]:
    assert plain.state.global_step == 21
    os.environ["TRAINER_CASES"] = str(folder)
    return on_processes(cases.RANKS, "tests.integrations.trainer_cases:all_cases", folder, "gloo", limit_s=800)


def losses(log: list[dict[str, Any]]) -> list[float]:
    return [line["loss"] for line in log if "loss" in line]


# TRL computes the loss of DPO in fp32, whatever the model's dtype is.
CLOSE = {"preferences": 1e-7}


@pytest.mark.parametrize("name", cases.CASES)
def test_params_and_losses_are_those_of_one_process(name: str, by_rank: list[dict[str, Any]], tmp_path: Path) -> None:
    case = cases.CASES[name]
    expected = cases.dense(case, tmp_path)
    for found in by_rank:
        for key, param in params_of(expected.model).items():
            torch.testing.assert_close(found[name]["params"][key], param, rtol=0, atol=CLOSE.get(name, 1e-10))
        assert found[name]["divisions"] == by_rank[0][name]["divisions"]
    log = by_rank[0][name]["log"]
    assert losses(log) == pytest.approx(losses(expected.state.log_history), rel=1e-5)
    divisions = [division for division in by_rank[0][name]["divisions"] if sum(division) == cases.STEP]
    expected_last = (12, 4) if case.shares is None else None
    if expected_last is not None and len(divisions) > 12:
        assert divisions[0] == (8, 8)
        assert divisions[-1] == expected_last
    assert {"samples_per_second", "share_rank_0", "share_rank_1"} <= log[0].keys()
    assert log[-2]["share_rank_0"] + log[-2]["share_rank_1"] == pytest.approx(1.0, abs=1e-3)


def test_a_run_goes_on_inside_an_epoch_with_the_shares_that_it_had(by_rank: list[dict[str, Any]], plain: Any) -> None:
    for found in by_rank:
        for name in ("saved", "resumed", "from a plain one"):
            for key, param in params_of(plain.model).items():
                torch.testing.assert_close(found[name]["params"][key], param, rtol=0, atol=1e-10)
        assert found["resumed"]["divisions"] == found["saved"]["divisions"][cases.SAVED_AT :]
        assert len(found["from a plain one"]["divisions"]) == 21 - cases.SAVED_AT


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "fsdp"])
def test_a_sharded_run_goes_on_inside_an_epoch(strategy: str, by_rank: list[dict[str, Any]], plain: Any) -> None:
    for found in by_rank:
        for name in ("saved", "resumed", "from a plain one"):
            for key, param in params_of(plain.model).items():
                torch.testing.assert_close(found[f"{strategy}, {name}"]["params"][key], param, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("reader", "writer"),
    [("plain", "saved"), ("attached", "saved"), ("plain", "zero1"), ("attached", "zero2"), ("plain", "fsdp")],
)
def test_one_process_goes_on_from_a_checkpoint_of_two(
    reader: str, writer: str, by_rank: list[dict[str, Any]], folder: Path, plain: Any, tmp_path: Path
) -> None:
    assert by_rank
    trainer = cases.classification(tmp_path, batch=cases.STEP, epochs=3)
    if reader == "attached":
        attach(trainer)
    trainer.train(resume_from_checkpoint=cases.checkpoint(folder / writer))
    for key, param in params_of(plain.model).items():
        torch.testing.assert_close(params_of(trainer.model)[key], param, rtol=0, atol=1e-10)


def test_evaluations_are_those_of_one_process(by_rank: list[dict[str, Any]], tmp_path: Path) -> None:
    case = cases.CASES["classification"]
    expected = cases.dense(case, tmp_path, eval_strategy="steps", eval_steps=5, per_device_eval_batch_size=16)
    lines = [line for line in expected.state.log_history if "eval_loss" in line]
    found = [line for line in by_rank[0]["evaluated"]["log"] if "eval_loss" in line]
    assert len(found) == len(lines) >= 4
    for line, one in zip(found, lines, strict=True):
        assert line["eval_right"] == one["eval_right"]
        assert line["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"train_sampling_strategy": "batch_rebalance"}, "batch_rebalance"),
        ({"train_sampling_strategy": "group_by_length"}, "group_by_length"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches"),
        ({"accelerator_config": {"use_seedable_sampler": False}}, "use_seedable_sampler"),
        (
            {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
            "sync_each_batch",
        ),
    ],
    ids=str,
)
def test_what_moves_samples_by_itself_is_refused(options: dict[str, Any], word: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=word):
        attach(cases.classification(tmp_path, **options))


def test_data_without_numbers_and_other_shardings_are_refused(tmp_path: Path) -> None:
    from transformers import Trainer

    args = cases.arguments(tmp_path, max_steps=3)
    with pytest.raises(InputError, match="IterableDataset"):
        attach(Trainer(model=cases.bert(), args=args, train_dataset=Endless(), data_collator=class_batch))
    for attribute, word in (("is_deepspeed_enabled", "DeepSpeed"), ("is_fsdp_enabled", "FSDP")):
        trainer = cases.classification(tmp_path)
        setattr(trainer, attribute, True)
        with pytest.raises(InputError, match=word):
            attach(trainer)


def test_wrong_calls_are_refused(tmp_path: Path) -> None:
    trainer = cases.classification(tmp_path)
    for policy in ("cadence", "async"):
        with pytest.raises(InputError, match=policy):
            attach(trainer, policy)
    with pytest.raises(InputError, match="one of them"):
        attach(trainer, "sync", shares=(1,))
    with pytest.raises(InputError, match="numbers for 1"):
        attach(trainer, shares=(3, 1))
    with pytest.raises(InputError, match="zero3"):
        attach(trainer, strategy="zero3")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="memory_shares"):
        attach(trainer, memory_shares=(1,))
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", **cases.SAVES, "eval_steps": cases.SAVED_AT}
    with pytest.raises(InputError, match="load_best_model_at_end"):
        attach(cases.classification(tmp_path, **best), strategy="fsdp")
    attach(trainer)
    with pytest.raises(InputError, match="once"):
        attach(trainer)


@pytest.mark.parametrize("starter", ["uneven run", "torchrun"])
def test_the_example_shows_its_shares(starter: str, tmp_path: Path) -> None:
    script = EXAMPLES / "hf_trainer.py"
    options = ("--samples", "400", "--output-dir", tmp_path / "out")
    commands: dict[str, list[Any]] = {
        "uneven run": [BIN / "uneven", "run", script, "--devices", "cpu,cpu@0.4", "--", *options],
        "torchrun": [BIN / "torchrun", "--standalone", "--nproc-per-node", "2", script, *options],
    }
    done = start(commands[starter], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "share_rank_1" in done.stdout
    (saved,) = (tmp_path / "out").glob("checkpoint-*")
    assert (saved / "trainer_state.json").exists()


def test_a_script_that_forgets_attach_is_told(tmp_path: Path) -> None:
    text = (EXAMPLES / "hf_trainer.py").read_text().replace("attach(trainer)", "")
    (tmp_path / "train.py").write_text(text)
    options = ("--samples", "32", "--output-dir", tmp_path / "out")
    done = start([sys.executable, "-m", "uneven", "run", "train.py", "--devices", "cpu,cpu", "--", *options], tmp_path)
    assert done.returncode == 2
    assert "without calling uneven" in done.stderr
