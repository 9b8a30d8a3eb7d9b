"""Plain scripts and their twins with uneven: a short difference, the same params on two devices; async ends well."""

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import data

from tests.forked import ROOT, run_forked
from uneven.data.sample_order import permutation

EXAMPLES = ROOT / "examples"
TWINS = ("gan", "chargpt")

# In fp64, with the plain script's global batch over two devices; what each script trained is saved by every rank.
WRAPPER = """
import runpy, sys, torch
from pathlib import Path
from uneven import Ddp

torch.set_default_dtype(torch.float64)
setup = Ddp.setup
Ddp.setup = lambda *given, batch_size, **more: setup(*given, batch_size=batch_size // 2, progress="off", **more)
out, results = Path(sys.argv[1]), {}
for name in sys.argv[2:]:
    made = runpy.run_path(name)
    ddp = made["ddp"]
    state = ddp.finish()
    results[Path(name).stem] = {"params": state.params, "losses": [entry["train_loss"] for entry in state.history]}
torch.save(results, out / f"rank-{Ddp.rank()}")
"""


class InOrder(data.DataLoader):  # type: ignore[type-arg]
    """A DataLoader whose `shuffle` is the order that uneven takes, with the seed 0."""

    def __init__(self, dataset: Any, *, batch_size: int, shuffle: bool) -> None:
        super().__init__(dataset, batch_size=batch_size)
        assert shuffle
        self._epoch = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        order = torch.from_numpy(permutation(0, self._epoch, len(self.dataset)))  # type: ignore[arg-type]
        self._epoch += 1
        batches = order.split(self.batch_size or 1)
        return (data.default_collate([self.dataset[int(row)] for row in batch]) for batch in batches)


def plain(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """What the plain script trains, under the names of its twin's params."""
    monkeypatch.setattr(data, "DataLoader", InOrder)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.random.fork_rng():
            made = runpy.run_path(str(EXAMPLES / f"plain_{name}.py"))
    finally:
        torch.set_default_dtype(torch.float32)
    model = torch.nn.ModuleList([made["gen"], made["disc"]]) if name == "gan" else made["model"]
    return {name: param.detach() for name, param in model.named_parameters()}


def run_twins(folder: Path, policy: str) -> list[dict[str, Any]]:
    script = folder / "twins.py"
    script.write_text(WRAPPER)
    scripts = [str(EXAMPLES / f"{name}.py") for name in TWINS]
    options = ["--devices", "cpu,cpu@0.4", "--policy", policy]
    done = run_forked([sys.executable, "-m", "uneven", "run", script, folder, *scripts, *options], cwd=folder)
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"rank-{rank}") for rank in range(2)]


def test_balanced_twins_train_the_params_of_the_plain_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = run_twins(tmp_path, "balanced")
    for name in TWINS:
        expected = plain(name, monkeypatch)
        for rank in ranks:
            assert rank[name]["params"].keys() == expected.keys()
            for param, value in rank[name]["params"].items():
                torch.testing.assert_close(value, expected[param], rtol=1e-8, atol=1e-8)
    assert "loss" in capsys.readouterr().out


@pytest.mark.soak  # async between processes: test_the_sentences_on_two_devices... and train/test_local_sgd_processes.py
def test_async_twins_end_well(tmp_path: Path) -> None:
    first, second = run_twins(tmp_path, "async")
    for name in TWINS:
        for param, value in first[name]["params"].items():
            assert value.isfinite().all()
            assert torch.equal(value, second[name]["params"][param])
    losses = first["chargpt"]["losses"]
    assert losses[-1] < 0.9 * losses[0]
