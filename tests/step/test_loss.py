"""Outputs that a train step may return: whichever labels their loss is a mean over, the count is theirs.

Whole runs are in tests/train/test_check_loss.py.
"""

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.step.token_models import LENGTHS, Language, own_loss, padded
from uneven.errors import InputError
from uneven.step.loss import IGNORED, OutputStep, read_loss


def whole_output(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return model(**batch)


@pytest.mark.parametrize("is_mapping", [False, True])
@pytest.mark.parametrize("is_shifted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_parts_of_a_batch_give_the_loss_of_the_whole(is_shifted: bool, is_mapping: bool, dtype: torch.dtype) -> None:
    model = Language(is_shifted=is_shifted, is_mapping=is_mapping).eval().to(dtype)
    batch = padded()
    step = OutputStep(whole_output)
    parts = [{name: tensor[rows] for name, tensor in batch.items()} for rows in (slice(0, 1), slice(1, 8))]
    losses = [read_loss(step(model, part)) for part in parts]
    assert [int(count) for _, count in losses] == [LENGTHS[0] - is_shifted, sum(LENGTHS[1:]) - 7 * is_shifted]
    out = model(**batch)
    whole = out["loss"] if is_mapping else out.loss
    found = sum(loss for loss, _ in losses) / sum(count for _, count in losses)
    torch.testing.assert_close(found, whole, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=0.0)


def test_one_label_a_sample_is_not_shifted_and_ignored_samples_do_not_count() -> None:
    model = nn.Linear(4, 3)
    labels = torch.tensor([0, IGNORED, 2, 1])

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        logits = model(batch["x"])
        return OrderedDict(loss=F.cross_entropy(logits, batch["labels"]), logits=logits)

    loss, count = read_loss(OutputStep(step)(model, {"x": torch.ones(4, 4), "labels": labels}))
    torch.testing.assert_close(loss / 3, F.cross_entropy(model(torch.ones(4, 4)), labels))
    assert count == 3


@pytest.mark.parametrize("labels", [None, torch.tensor([[0.5], [1.0]])])
def test_without_labels_or_with_numbers_it_is_a_mean_over_samples(labels: Tensor | None) -> None:
    model = nn.Linear(2, 1)
    batch = {"x": torch.ones(2, 2)} | ({} if labels is None else {"labels": labels})
    step = OutputStep(lambda model, batch: SimpleNamespace(loss=model(batch["x"]).mean()))
    assert read_loss(step(model, batch)) == (model(batch["x"]).mean(), None)


def test_a_batch_without_any_label_adds_nothing_and_leaves_the_shift_open() -> None:
    model, step = Language().eval(), OutputStep(whole_output)
    batch = padded()
    none = batch | {"labels": torch.full_like(batch["labels"], IGNORED)}
    for given, expected in ((none, 0), (batch, sum(LENGTHS) - len(LENGTHS)), (none, 0)):
        model.zero_grad()
        loss, count = read_loss(step(model, given))
        loss.backward()
        assert count == expected
        assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())
        assert (loss == 0) == (expected == 0)


@pytest.mark.parametrize("kind", ["another loss", "no logits", "labels of another shape", "labels that are a list"])
def test_a_loss_whose_labels_are_not_known_is_refused_with_what_to_write(kind: str) -> None:
    def step(model: nn.Module, batch: Any) -> Any:
        out = model(**{**batch, "labels": padded()["labels"]})
        loss = out.loss + 0.1 if kind == "another loss" else out.loss
        return {"loss": loss} if kind == "no logits" else {"loss": loss, "logits": out.logits}

    labels: Any = padded()["labels"]
    labels = labels[:, :4] if kind.startswith("labels of") else labels
    labels = labels.tolist() if kind.startswith("labels that") else labels
    with pytest.raises(InputError, match=r"return \(out\.loss \* count, count\)"):
        OutputStep(step)(Language(), {**padded(), "labels": labels})


def test_what_is_no_output_passes_as_it_is() -> None:
    model, batch = Language(), padded()
    for result in (own_loss(model, batch), (own_loss(model, batch), 3), None, 0.5, {"metric": 1.0}):
        assert OutputStep(lambda model, batch, result=result: result)(model, batch) is result


@pytest.mark.parametrize(("kind", "shift"), [("GPT2LMHead", 1), ("BertForMaskedLM", 0), ("T5", 0), ("Bert", 0)])
def test_models_of_transformers(kind: str, shift: int) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    bert = transformers.BertConfig(vocab_size=11, num_labels=3, **sizes)
    make = {
        "GPT2LMHead": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=11, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
        ),
        "BertForMaskedLM": lambda: transformers.BertForMaskedLM(bert),
        "Bert": lambda: transformers.BertForSequenceClassification(bert),
        "T5": lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=11, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
            )
        ),
    }
    model, given = make[kind]().eval(), padded()
    batch = {"input_ids": given.pop("ids"), **given}
    if kind == "Bert":
        batch["labels"] = torch.arange(len(LENGTHS)) % 3
    expected = model(**batch).loss
    loss, count = read_loss(OutputStep(whole_output)(model, batch))
    assert int(count) == (batch["labels"] != IGNORED).sum() - shift * len(LENGTHS)
    torch.testing.assert_close(loss / count, expected)
