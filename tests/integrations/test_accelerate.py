"""A loop of accelerate with an attached loader, on two ranks: the params of one process, and what is refused.

`make test-frameworks` runs it; without accelerate and transformers it is skipped.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

for package in ("accelerate", "transformers"):
    pytest.importorskip(package, reason="run by make test-frameworks")

from tests.api.starts import BIN, start
from tests.integrations import accelerate_cases as cases
from tests.integrations.tiny_models import Endless, bert, class_batch, classes
from tests.ranks import on_processes
from uneven.errors import InputError
from uneven.integrations.accelerate import attach

pytestmark = pytest.mark.timeout(900)  # a file imports the frameworks in three processes
EXAMPLE = Path(__file__).parents[2] / "examples" / "accelerate_loop.py"


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("accelerate")
    os.environ["ACCELERATE_CASES"] = str(folder)
    return on_processes(cases.RANKS, "tests.integrations.accelerate_cases:all_cases", folder, "gloo", limit_s=800)


@pytest.mark.parametrize("name", [*cases.CASES, "saved", "resumed"])
def test_params_are_those_of_one_process(name: str, by_rank: list[dict[str, Any]], tmp_path: Path) -> None:
    case = cases.CASES.get(name, cases.CASES["measured, accumulation"])
    expected = cases.train(case, tmp_path, is_shared=False)
    for found in by_rank:
        for key, param in expected["params"].items():
            torch.testing.assert_close(found[name]["params"][key], param, rtol=0, atol=1e-10)
        assert found[name]["right"] == expected["right"][-len(found[name]["right"]) :]
        assert found[name]["steps"] == expected["steps"] == 7 * case.epochs
    divisions = [division for division in by_rank[0][name]["divisions"] if sum(division) == cases.STEP]
    if case.shares is None and name != "resumed":
        assert (divisions[0], divisions[-1]) == ((8, 8), (12, 4))


def test_a_resumed_run_has_the_shares_that_it_had(by_rank: list[dict[str, Any]]) -> None:
    for found in by_rank:
        assert found["resumed"]["divisions"] == found["saved"]["divisions"][cases.SAVED_AT :]


def test_a_gather_inside_a_step_takes_different_numbers_of_rows(by_rank: list[dict[str, Any]]) -> None:
    expected = [row["labels"] for row in classes().rows[: cases.STEP]]
    assert [found["gathered"] for found in by_rank] == [expected] * 2


def prepare(loader: "DataLoader[Any] | None" = None, **options: Any) -> tuple[Any, Any, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, **options)
    loader = DataLoader(classes(), collate_fn=class_batch, batch_size=8) if loader is None else loader
    return (accelerator, *accelerator.prepare(bert(), loader))


@pytest.mark.parametrize("option", ["split_batches", "dispatch_batches"])
def test_what_divides_batches_by_itself_is_refused(option: str) -> None:
    from accelerate.utils import DataLoaderConfiguration

    with pytest.raises(InputError, match=option):
        attach(*prepare(dataloader_config=DataLoaderConfiguration(**{option: True})))


def test_data_without_numbers_and_wrong_calls_are_refused() -> None:
    with pytest.raises(InputError, match="IterableDataset"):
        attach(*prepare(DataLoader(Endless(), batch_size=4)))
    accelerator, model, loader = prepare()
    with pytest.raises(InputError, match="cadence"):
        attach(accelerator, model, loader, policy="cadence")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="one of them"):
        attach(accelerator, model, loader, policy="sync", shares=(1,))
    attach(accelerator, model, loader)
    with pytest.raises(InputError, match="once"):
        attach(accelerator, model, loader)


def test_a_state_is_saved_between_two_steps(tmp_path: Path) -> None:
    accelerator, model, loader = prepare(gradient_accumulation_steps=2)
    loader = attach(accelerator, model, loader)
    first, second, *_ = loader
    accelerator.backward(model(**first).loss)
    with pytest.raises(InputError, match="sync_gradients"):
        accelerator.save_state(tmp_path)
    accelerator.backward(model(**second).loss)
    accelerator.save_state(tmp_path)
    assert any(tmp_path.iterdir())


@pytest.mark.parametrize("starter", ["uneven run", "torchrun"])
def test_the_example_shows_its_shares(starter: str, tmp_path: Path) -> None:
    options = ("--samples", "400", "--epochs", "1")
    commands: dict[str, list[Any]] = {
        "uneven run": [BIN / "uneven", "run", EXAMPLE, "--devices", "cpu,cpu@0.4", "--", *options],
        "torchrun": [BIN / "torchrun", "--standalone", "--nproc-per-node", "2", EXAMPLE, *options],
    }
    done = start(commands[starter], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "shares (" in done.stdout
