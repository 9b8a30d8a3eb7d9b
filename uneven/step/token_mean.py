"""Whether a loss is a mean over tokens, where the losses of a step's batches are weighted by their samples.

[Note: means over tokens] A mean over samples stays exact however a step is cut into batches, because each batch counts
by its samples (step/eager.py). The `.loss` of a language model is a mean over tokens, of which samples have more and
fewer: its gradients are wrong wherever a step is cut, by less than a percent, and nothing else would notice. So a loss
that may be one is tried on parts of a batch. If it is one, the parts weighted by tokens give the loss of the whole, and
weighted by samples they do not. A loss over the whole batch, as a contrastive one, fits neither and is let alone.

Called by train/prepare.py. Forwards alone are run, in eval mode, and leave nothing behind.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from uneven.data.batches import rows_of
from uneven.errors import InputError
from uneven.step.loss import EXACT, IGNORED, ROUNDED
from uneven.step.no_trace import no_trace_of_forward

WHOLE = (torch.int16, torch.int32, torch.int64)
BATCHES = 4  # that are looked at, until one has samples with more and with fewer tokens

TrainStep = Callable[[nn.Module, Any], Any]
Named = list[tuple[str, Tensor]]


class TokenCount(NamedTuple):
    """A way to count tokens: as the user may write it, and for every sample of the batch."""

    text: str
    tokens: Tensor


class Part(NamedTuple):
    """Some samples of a batch, and the mean loss over them."""

    samples: Tensor
    loss: float


Cuts = Sequence[tuple[Part, Part]]  # of one batch in two parts


class TokenMeanCheck:
    """Life cycle: `look` at one batch after the other, until it returns True. InputError where it finds such a loss."""

    def __init__(self, model: nn.Module, advice: str = "return {loss} * count, count") -> None:
        """`advice`: what the user is to write, with {loss} for the loss as the user has it."""
        self._model, self._advice = model, advice
        self._has_output = True  # a forward may return its loss in an output; known after the first time
        self._looks = 0

    def look(self, train_step: TrainStep, batch: Any, samples: int, name: str = "batch") -> bool:
        """Try the train step on this batch; returns whether no other batch has to be looked at.

        `name` is what the user calls the batch.
        """
        named = list(named_tensors(batch, name))
        counts = find_counts(named, samples)
        self._looks += 1
        if not counts and not any(map(_may_be_tokens, named)) and named:
            return True
        if samples < 2 or not (counts or self._has_output):
            return self._looks == BATCHES
        device = next(self._model.parameters()).device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return True
        with _tried(self._model, device):
            try:
                found = self._try(train_step, batch, samples, named)
            except Exception:
                # Not lost: a step that cannot run here, in eval mode or on half a batch, is not known to be wrong, and
                # what is wrong with it otherwise comes up in training.
                return True
        if isinstance(found, str):
            raise InputError(found)
        return found or self._looks == BATCHES

    def _try(self, train_step: TrainStep, batch: Any, samples: int, named: Named) -> bool | str:
        """What is wrong with the loss; else whether this batch has settled that nothing is."""
        with _watched(self._model) as seen:
            result = train_step(self._model, batch)
        if not isinstance(result, Tensor) or result.numel() != 1:
            return True  # (loss_sum, count) says by what it is to be divided
        self._has_output = bool(seen)
        known = [tensor for _, tensor in named]
        unknown = [(name, tensor) for name, tensor in seen if not any(tensor is other for other in known)]
        counts = find_counts([*named, *unknown], samples)
        if not counts:
            return False
        whole = Part(torch.arange(samples), float(result))

        def part_of(rows: Tensor) -> Part:
            return Part(rows, float(train_step(self._model, rows_of(batch, rows, samples))))

        cuts = [(part_of(few), part_of(many)) for few, many in _cuts(counts[0].tokens)]
        noise = EXACT if all(param.dtype.itemsize >= 4 for param in self._model.parameters()) else ROUNDED
        misses = [miss_of(count.tokens, whole, cuts, noise) for count in counts]
        best, place = min((torch.inf if miss is None else miss, place) for place, miss in enumerate(misses))
        if best == torch.inf:
            return None not in misses
        count = counts[place]
        by_samples = _mean(cuts[0], torch.ones(samples))
        return (
            "the loss is a mean over tokens, but the losses of a step's batches are weighted by their samples, which "
            f"have {count.tokens.min():g} to {count.tokens.max():g} tokens here: two parts of a batch give "
            f"{by_samples:.6g} instead of {whole.loss:.6g}; "
            + self._advice.format(loss="out.loss" if seen else "loss")
            + f", with count = {count.text}, or train as it is by check_loss=False"
        )


def miss_of(tokens: Tensor, whole: Part, cuts: Cuts, noise: float) -> float | None:
    """By how much parts weighted by tokens miss the loss of the whole, where parts weighted by samples miss it by more.

    Infinity where tokens do not give it, or samples do; None where it cannot be told.
    """
    misses = []
    for cut in cuts:
        rounding = noise * max(abs(part.loss) for part in (whole, *cut))
        off = abs(_mean(cut, torch.ones(len(tokens))) - whole.loss)
        miss = abs(_mean(cut, tokens) - whole.loss)
        if off > 10 * rounding:
            misses.append(miss if miss <= max(rounding, off / 100) else torch.inf)
        elif not miss <= 10 * rounding:
            misses.append(torch.inf)
    return max(misses, default=None)


def _mean(parts: Iterable[Part], weights: Tensor) -> float:
    """The mean of the parts' losses, each by the weights of its samples."""
    pairs = [(part.loss, float(weights[part.samples].sum())) for part in parts]
    total = sum(weight for _, weight in pairs)
    return sum(loss * weight for loss, weight in pairs) / total if total else float("nan")


def _cuts(tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The samples with few tokens and those with many: in halves, and the longest against all others."""
    order = tokens.argsort()
    places = dict.fromkeys((len(order) // 2, len(order) - 1))
    return [(order[:place], order[place:]) for place in places if tokens[order[:place]].sum()]


def named_tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a batch, each as a train step may write it."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from named_tensors(part, f"{name}[{key!r}]")
    elif isinstance(value, tuple | list):
        for place, part in enumerate(value):
            yield from named_tensors(part, f"{name}[{place}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from named_tensors(getattr(value, field.name), f"{name}.{field.name}")


def find_counts(named: Named, samples: int) -> list[TokenCount]:
    """Ways to count the tokens of every sample, by labels with -100 first, by a mask; none that is the same for all."""
    named = sorted(named, key=lambda pair: pair[1].dtype not in WHOLE or not bool((pair[1] == IGNORED).any()))
    found = [count for name, tensor in named for count in _counts_in(name, tensor, samples)]
    return [count for count in found if len(count.tokens.unique()) > 1]


def _counts_in(name: str, tensor: Tensor, samples: int) -> Iterator[TokenCount]:
    if tensor.ndim == 0 or len(tensor) != samples or tensor.is_complex():
        return
    is_labels = tensor.dtype in WHOLE and bool((tensor == IGNORED).any())
    if not is_labels and (tensor.ndim < 2 or not bool(((tensor == 0) | (tensor == 1)).all())):
        return
    shifts = {"": tensor} if tensor.ndim < 2 else {"": tensor, "[:, 1:]": tensor[:, 1:], "[:, :-1]": tensor[:, :-1]}
    for shift, part in shifts.items():
        if is_labels:
            yield TokenCount(f"({name}{shift} != {IGNORED}).sum()", _per_sample(part != IGNORED))
        else:
            yield TokenCount(f"{name}{shift}.sum()", _per_sample(part != 0))
            yield TokenCount(f"({name}{shift} == 0).sum()", _per_sample(part == 0))


def _per_sample(is_token: Tensor) -> Tensor:
    return is_token.flatten(1).sum(1).cpu() if is_token.ndim > 1 else is_token.long().cpu()


def _may_be_tokens(named: tuple[str, Tensor]) -> bool:
    """Whether these may be tokens, of which a forward with an output of its own makes labels."""
    return named[1].ndim > 1 and named[1].dtype in WHOLE


@contextmanager
def _watched(model: nn.Module) -> Iterator[Named]:
    """The tensors by name that a forward was given which returns its loss in an output, as transformers' models do."""
    seen: Named = []

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(loss, Tensor):
            arguments = {**dict(zip(inspect.signature(module.forward).parameters, args, strict=False)), **kwargs}
            seen.extend(pair for name, value in arguments.items() for pair in named_tensors(value, name))

    with ExitStack() as hooks:
        for module in model.modules():
            hooks.callback(module.register_forward_hook(look, with_kwargs=True).remove)
        yield seen


@contextmanager
def _tried(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Forwards inside are in eval mode, in full precision, without gradients and compilation, and leave no trace."""
    modes = [(module, module.training) for module in model.modules()]
    with ExitStack() as around:
        around.enter_context(no_trace_of_forward(model, device))
        around.enter_context(torch.no_grad())
        around.enter_context(torch.autocast(device.type, enabled=False))
        around.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("highest")
        if model._compiled_call_impl is not None:
            around.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            model.eval()
            yield
        finally:
            for module, was_training in modes:
                module.training = was_training
