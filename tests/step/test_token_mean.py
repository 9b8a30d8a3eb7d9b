"""Losses that are means over tokens are found by two cuts of a batch; everything else is let alone, and left as it was.

Whole runs are in tests/train/test_check_loss.py.
"""

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.step.token_models import LENGTHS, WORDS, Language, contrastive, masked_losses, own_loss, padded, sample_mean
from uneven.errors import InputError
from uneven.step.loss import IGNORED
from uneven.step.token_mean import BATCHES, TokenMeanCheck

Step = Callable[[nn.Module, Any], Any]


def masked_mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    losses, mask = masked_losses(model, batch)
    return losses.sum() / mask.sum()


def look(step: Step, batch: Any, model: nn.Module | None = None, samples: int = len(LENGTHS)) -> bool:
    return TokenMeanCheck(model or Language()).look(step, batch, samples)


@pytest.mark.parametrize("is_mapping", [False, True])
@pytest.mark.parametrize("is_shifted", [False, True])
def test_the_loss_of_an_output_is_refused_with_the_tokens_as_it_counts_them(is_shifted: bool, is_mapping: bool) -> None:
    def step(model: nn.Module, batch: Any) -> Tensor:
        out = model(**batch)
        return out["loss"] if is_mapping else out.loss  # type: ignore[no-any-return]

    with pytest.raises(InputError, match=r"return out\.loss \* count, count") as caught:
        look(step, padded(), Language(is_shifted=is_shifted, is_mapping=is_mapping))
    shift = "[:, 1:]" if is_shifted else ""
    assert f"count = (batch['labels']{shift} != -100).sum()" in str(caught.value)
    assert "check_loss=False" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_advice_holds() -> None:
    """The same model, by what the message says to write: any cut gives the loss of the whole batch."""
    model, batch = Language().eval(), padded()

    def advised(rows: slice) -> tuple[Tensor, Tensor]:
        part = {name: tensor[rows] for name, tensor in batch.items()}
        count = (part["labels"][:, 1:] != -100).sum()
        return model(**part).loss * count, count

    (one, few), (other, many) = advised(slice(0, 3)), advised(slice(3, 8))
    torch.testing.assert_close((one + other) / (few + many), own_loss(model, batch))
    assert look(lambda model, batch: (own_loss(model, batch), 1), batch)  # whatever it is divided by, the user has said


def test_labels_that_the_step_makes_are_seen_where_the_model_is_given_them() -> None:
    def step(model: nn.Module, batch: Any) -> Tensor:
        ids, lengths = batch
        labels = ids.masked_fill(torch.arange(ids.shape[1])[None] >= lengths[:, None], IGNORED)
        return model(ids, None, labels).loss  # type: ignore[no-any-return]

    batch = (padded()["ids"], torch.tensor(LENGTHS))
    with pytest.raises(InputError, match=r"count = \(labels\[:, 1:\] != -100\)\.sum\(\)"):
        look(step, batch)


def test_an_output_inside_the_users_own_module_is_seen() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.language = Language()

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.language(**batch).loss  # type: ignore[no-any-return]

    with pytest.raises(InputError, match=r"out\.loss \* count"):
        look(lambda model, batch: model(batch), padded(), Wrapped())


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("mask", r"batch\['attention_mask'\]\.sum\(\)"),
        ("tuple", r"\(batch\[1\] != -100\)\.sum\(\)"),
        ("inverted", r"\(batch\[1\] == 0\)\.sum\(\)"),
        ("object", r"batch\.mask\.sum\(\)"),
        ("user dict", r"batch\['attention_mask'\]\.sum\(\)"),
    ],
)
def test_a_mean_over_tokens_of_the_users_own_is_refused(kind: str, text: str) -> None:
    @dataclass
    class Batch:
        ids: Tensor
        mask: Tensor

    given = padded()
    ids, mask, labels = given["ids"], given["attention_mask"], given.pop("labels")
    of_labels: Step = lambda model, batch: F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1])  # noqa: E731
    cases: dict[str, tuple[Step, Any]] = {
        "mask": (masked_mean, given),
        "tuple": (of_labels, (ids, labels)),
        "inverted": (
            lambda model, batch: masked_mean(model, {"ids": batch[0], "attention_mask": ~batch[1]}),
            (ids, mask == 0),
        ),
        "object": (
            lambda model, batch: masked_mean(model, {"ids": batch.ids, "attention_mask": batch.mask}),
            Batch(ids, mask),
        ),
        "user dict": (masked_mean, UserDict(given)),
    }
    with pytest.raises(InputError, match=rf"return loss \* count, count, with count = {text}"):
        look(*cases[kind])


@pytest.mark.parametrize("lengths", [(2, 9), (9, 2), (1, 4, 9), LENGTHS])
@pytest.mark.parametrize("seed", range(5))
def test_it_is_found_in_batches_of_any_size(lengths: tuple[int, ...], seed: int) -> None:
    with pytest.raises(InputError, match="mean over tokens"):
        look(masked_mean, padded(lengths, seed), samples=len(lengths))


@pytest.mark.parametrize("lengths", [(2, 9), (1, 4, 9), LENGTHS])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("step", [sample_mean, contrastive])
def test_a_mean_over_samples_and_a_loss_over_the_whole_batch_pass(
    step: Step, lengths: tuple[int, ...], seed: int
) -> None:
    assert look(step, padded(lengths, seed), samples=len(lengths))


def test_samples_with_as_many_tokens_pass_and_more_batches_are_looked_at() -> None:
    check = TokenMeanCheck(Language())
    assert not check.look(own_loss, padded((6, 6, 6), 0), 3)
    with pytest.raises(InputError, match="mean over tokens"):
        check.look(own_loss, padded((2, 6, 5), 0), 3)
    check = TokenMeanCheck(Language())
    looks = [check.look(own_loss, padded((6, 6, 6), seed), 3) for seed in range(BATCHES)]
    assert looks == [False] * (BATCHES - 1) + [True]


def test_a_step_without_tokens_is_not_called() -> None:
    def never(model: nn.Module, batch: Any) -> Tensor:
        raise AssertionError

    assert look(never, (torch.randn(8, 3, 4, 4), torch.randint(0, 10, (8,))))
    assert look(never, (torch.randint(0, 255, (8, 28, 28), dtype=torch.uint8), torch.randint(0, 10, (8,))))


@pytest.mark.parametrize("kind", ["raises", "no tensor", "needs gradients", "not finite"])
def test_a_step_that_cannot_be_tried_is_left_to_the_run(kind: str) -> None:
    def step(model: nn.Module, batch: Any) -> Any:
        loss = own_loss(model, batch)
        if kind == "raises":
            raise KeyError(kind)
        if kind == "needs gradients":
            torch.autograd.grad(loss, list(model.parameters()))
        return {"loss": loss} if kind == "no tensor" else loss / 0 if kind == "not finite" else loss

    assert look(step, padded())


def test_labels_of_whole_samples_that_are_ignored_are_counted() -> None:
    model, x, y = nn.Linear(4, 3), torch.randn(8, 4), torch.tensor([0, -100, 2, 1, -100, -100, 1, 0])
    with pytest.raises(InputError, match=r"\(batch\[1\] != -100\)\.sum\(\)"):
        look(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), (x, y), model)


@pytest.mark.parametrize("step", [own_loss, sample_mean])
def test_nothing_is_left_of_a_trial(step: Step) -> None:
    """Modes, buffers, gradients, hooks and random numbers; the step counts its calls in a buffer and draws numbers."""
    model = Language()
    model.register_buffer("calls", torch.zeros(3))
    model.norm.eval()  # frozen, on purpose
    calls: Tensor = model.calls

    def counted(model: Any, batch: Any) -> Tensor:
        assert not model.training
        assert not torch.is_grad_enabled()
        model.calls += torch.rand(3)
        model.calls = model.calls * 2
        return step(model, batch)

    state, random = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    try:
        look(counted, padded(), model)
    except InputError:
        assert step is own_loss
    assert model.calls is calls
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.children()] == [True, False, True]
    assert all(param.grad is None for param in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_half_precision_params_are_judged_by_their_rounding() -> None:
    model = Language().to(torch.bfloat16)
    assert look(lambda model, batch: sample_mean(model, batch).float(), padded(), model)
    with pytest.raises(InputError, match="mean over tokens"):
        look(lambda model, batch: own_loss(model, batch).float(), padded(), model)


def test_texts_that_the_step_makes_tokens_of_are_cut_with_the_batch() -> None:
    def step(model: nn.Module, batch: dict[str, list[str]]) -> Tensor:
        ids = torch.zeros(len(batch["text"]), 9, dtype=torch.int64)
        labels = torch.full_like(ids, IGNORED)
        for row, text in enumerate(batch["text"]):
            labels[row, : len(text)] = ids[row, : len(text)] = torch.tensor([int(letter) for letter in text])
        return model(ids, labels=labels).loss  # type: ignore[no-any-return]

    texts = {"text": ["12", "3456789", "01234", "987654321", "55"]}
    with pytest.raises(InputError, match=r"count = \(labels\[:, 1:\] != -100\)"):
        look(step, texts, samples=5)


@pytest.mark.parametrize("lengths", [(5, 60), (10, 20, 30, 64)])
def test_gpt2_of_transformers_is_found_and_right_as_the_message_says(lengths: tuple[int, ...]) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=WORDS, bos_token_id=0, eos_token_id=0)
    )
    given = padded(lengths)
    batch = {"input_ids": given.pop("ids"), **given}
    with pytest.raises(InputError, match=r"return out\.loss \* count, count.*\(batch\['labels'\]\[:, 1:\] != -100\)"):
        look(own_loss, batch, model, len(lengths))
    counts = (batch["labels"][:, 1:] != IGNORED).sum(1)
    losses = [own_loss(model.eval(), {name: t[[row]] for name, t in batch.items()}) for row in range(len(lengths))]
    by_tokens = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / counts.sum()
    torch.testing.assert_close(own_loss(model, batch), by_tokens)
