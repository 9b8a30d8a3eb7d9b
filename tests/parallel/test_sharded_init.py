"""Models made shard by shard: every shard, buffer and random number is what one process makes, in little memory."""

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.ranks import ThreadGroup, on_processes, on_threads
from uneven.comm.group import Group
from uneven.errors import InputError
from uneven.parallel.flat_shards import flat_memory, has_no_memory
from uneven.parallel.fsdp import FSDP
from uneven.parallel.sharded_init import Blueprint, dry_run, without_reads

FEW = 4096  # bytes that are whole at a time: about two layers of these models


def layers(count: int = 6, width: int = 20) -> list[nn.Module]:
    return [nn.Linear(width, width) for _ in range(count)]


class Noisy(nn.Module):
    """Buffers, tensors and numbers that were drawn, between params that were drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers())
        self.register_buffer("noise", torch.randn(5))
        self.register_buffer("count", torch.tensor(3.0))
        self.plain = [torch.randn(3), 1.5]
        self.number = float(torch.rand(1))
        self.norm = nn.BatchNorm1d(20)


def tied() -> nn.Module:
    model = nn.Module()
    model.embedding = nn.Embedding(30, 20, padding_idx=0)
    model.layers = nn.ModuleList(layers())
    model.head = nn.Linear(20, 30, bias=False)
    model.head.weight = model.embedding.weight
    return model


def applied(init: Callable[[Tensor], Any]) -> nn.Module:
    model = nn.Sequential(*layers())

    def each(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init(module.weight)
            nn.init.zeros_(module.bias)

    return model.apply(each)


def changed_later() -> nn.Module:
    model = nn.Sequential(*layers())
    with torch.no_grad():
        for layer in model:
            layer.weight.mul_(0.5)  # type: ignore[operator, union-attr]
            layer.weight[3].fill_(2.0)  # type: ignore[index, union-attr]
            layer.weight.t().normal_(0.0, 2.0)  # type: ignore[operator, union-attr]
            layer.bias.data[2:5] += 1.0  # type: ignore[index, union-attr]
    return model


def from_own_generator() -> nn.Module:
    own = torch.Generator().manual_seed(4)
    model = nn.Sequential(*layers())
    for layer in model:
        nn.init.normal_(layer.weight, generator=own)  # type: ignore[arg-type]
        nn.init.trunc_normal_(layer.bias, generator=own)  # type: ignore[arg-type]
    with torch.no_grad():
        for layer in model:
            layer.weight.add_(1.0)  # type: ignore[operator, union-attr]
    return model


def frozen() -> nn.Module:
    model = nn.Sequential(*layers()).requires_grad_(False)
    model.append(nn.Linear(20, 3))
    return model


def through_numpy() -> nn.Module:
    """Reads params that were put away, and writes to memory that no operation of torch tells of."""
    model = nn.Sequential(*layers())
    model.scale = float(abs(model[0].weight.detach().numpy()).sum()) + sum(model[1].bias.tolist())  # type: ignore[assignment, operator, union-attr]
    model[0].weight.detach().numpy()[:] = model.scale  # type: ignore[operator, union-attr]
    model.append(nn.Linear(20, 20))
    with torch.no_grad():
        for layer in model:
            layer.weight.mul_(0.5)  # type: ignore[operator, union-attr]
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(*layers()),
    "noisy": Noisy,
    "tied": tied,
    "frozen": frozen,
    "xavier": lambda: applied(nn.init.xavier_normal_),
    "orthogonal": lambda: applied(nn.init.orthogonal_),
    "trunc_normal": lambda: applied(nn.init.trunc_normal_),
    "sparse": lambda: applied(lambda weight: nn.init.sparse_(weight, 0.3)),
    "changed later": changed_later,
    "own generator": from_own_generator,
    "double": lambda: nn.Sequential(*layers()).double(),
    "halves": lambda: nn.Sequential(*layers()).to(torch.bfloat16),
    "channels_last": lambda: nn.Sequential(*(nn.Conv2d(8, 8, 3) for _ in range(4))).to(
        memory_format=torch.channels_last  # type: ignore[call-overload]
    ),
    "numpy": through_numpy,
    "deepcopy": lambda: nn.Sequential(*(copy.deepcopy(layer) for layer in [nn.Linear(20, 20)] * 5)),
    "transformer": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 3),
    "lstm": lambda: nn.LSTM(16, 16, num_layers=3),
    "weight_norm": lambda: nn.Sequential(*(parametrizations.weight_norm(nn.Linear(20, 20)) for _ in range(5))),
    "spectral_norm": lambda: nn.Sequential(*(parametrizations.spectral_norm(nn.Linear(20, 20)) for _ in range(5))),
    "assigned": lambda: nn.ParameterList([nn.Parameter(torch.randn(20, 20)) for _ in range(5)]),  # type: ignore[return-value]
}


def seed() -> None:
    torch.manual_seed(11)


def shapes_of(blueprint: Blueprint) -> dict[nn.Parameter, Tensor]:
    return {param: torch.full((param.numel(),), 7.0, dtype=param.dtype) for param in blueprint.model.parameters()}


def made_in_parts(make: Callable[[], nn.Module], kept_bytes: int = FEW) -> tuple[Blueprint, dict[nn.Parameter, Tensor]]:
    blueprint = dry_run(make, kept_bytes)
    assert blueprint is not None
    assert all(has_no_memory(param) for param in blueprint.model.parameters())
    values = shapes_of(blueprint)
    blueprint.make(seed, lambda param, whole: values[param].copy_(whole))
    return blueprint, values


def check(make: Callable[[], nn.Module], kept_bytes: int = FEW) -> None:
    blueprint, values = made_in_parts(make, kept_bytes)
    state = torch.get_rng_state()
    seed()
    expected = make()
    assert torch.equal(state, torch.get_rng_state())
    params = dict(expected.named_parameters())
    assert [*params] == [name for name, _ in blueprint.model.named_parameters()]
    for name, param in blueprint.model.named_parameters():
        assert param.stride() == params[name].stride()
        assert param.requires_grad == params[name].requires_grad
        assert torch.equal(values[param], flat_memory(params[name].detach())), name
    for name, buffer in expected.named_buffers():
        torch.testing.assert_close(blueprint.model.get_buffer(name), buffer, rtol=0, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_every_bit_is_as_in_one_process(name: str) -> None:
    check(MODELS[name])


def test_numbers_and_tensors_that_are_no_buffers_are_those_of_the_real_run() -> None:
    blueprint, _ = made_in_parts(Noisy)
    seed()
    expected = Noisy()
    assert isinstance(blueprint.model, Noisy)
    assert blueprint.model.number == expected.number
    torch.testing.assert_close(blueprint.model.plain, expected.plain, rtol=0, atol=0)


def llama(**changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    settings = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    return transformers.LlamaConfig(**settings, num_key_value_heads=2, vocab_size=64, **changes)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_model_from_a_config_of_transformers(is_tied: bool) -> None:
    config = llama(tie_word_embeddings=is_tied)
    transformers = pytest.importorskip("transformers")
    check(lambda: transformers.AutoModelForCausalLM.from_config(config), 20_000)


def test_a_pretrained_model_of_several_files_with_adapters(tmp_path: Path) -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    transformers.AutoModelForCausalLM.from_config(llama()).save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1

    def plain() -> nn.Module:
        found: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        return found

    def adapted() -> nn.Module:
        found: nn.Module = peft.get_peft_model(plain(), peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
        return found

    check(plain, 20_000)
    check(adapted, 20_000)


def test_what_is_read_later_and_cannot_be_made_again_stays_whole_until_the_end() -> None:
    """Its values came from another tensor, which is not kept."""

    def make() -> nn.Module:
        return applied(nn.init.orthogonal_).double()

    check(make)
    assert made_in_parts(make)[0].unrepeatable == "0.weight"
    assert made_in_parts(MODELS["double"])[0].unrepeatable is None


def test_a_model_that_is_another_one_the_second_time_is_refused() -> None:
    sizes = iter((5, 6))
    blueprint = dry_run(lambda: nn.Sequential(*layers(next(sizes))), FEW)
    assert blueprint is not None
    with pytest.raises(InputError, match="same model each time"):
        blueprint.make(seed, lambda *_: None)
    model = nn.Sequential(*layers())
    kept: list[nn.Module] = []
    blueprint = dry_run(lambda: kept[0] if kept else kept.append(nn.Sequential(*layers())) or kept[0], FEW)  # type: ignore[func-returns-value]
    assert blueprint is not None
    with pytest.raises(InputError, match="same model twice"):
        blueprint.make(seed, lambda *_: None)
    assert dry_run(lambda: model, FEW) is None, "it was there before, and stays as it is"
    assert not any(map(has_no_memory, model.parameters()))


def test_small_lazy_and_failing_models_are_made_as_they_are() -> None:
    assert dry_run(lambda: nn.Sequential(*layers())) is None
    assert dry_run(lambda: nn.Sequential(*layers(), nn.LazyLinear(3)), FEW) is None
    assert dry_run(lambda: 1 / 0, FEW) is None
    assert dry_run(lambda: None, FEW) is None


def test_an_optimizer_that_reads_params_is_refused() -> None:
    blueprint = dry_run(lambda: nn.Sequential(*layers()), FEW)
    assert blueprint is not None
    params = list(blueprint.model.parameters())
    without_reads(lambda params: torch.optim.Adagrad(params))(params)  # its state has only their shapes
    with pytest.raises(InputError, match="optimizer reads params"):
        without_reads(lambda params: [param.detach().clone() for param in params])(params)


def test_shards_of_all_ranks_together_are_the_model() -> None:
    def rank(group: ThreadGroup) -> tuple[dict[str, Tensor], dict[str, float], str]:
        blueprint = dry_run(lambda: nn.Sequential(*layers()), FEW)
        assert blueprint is not None
        strategy = FSDP(blueprint.model, torch.optim.AdamW, group, shares=(3, 1))
        blueprint.make(seed, strategy.put)
        return strategy.full_params(), blueprint.sums, blueprint.random_state

    (first, *rest), other = on_threads(2, rank)
    assert rest == list(other[1:])
    seed()
    for name, value in nn.Sequential(*layers()).named_parameters():
        torch.testing.assert_close(first[name], value.detach(), rtol=0, atol=0)
        assert rest[0][name] == pytest.approx(float(value.detach().abs().sum()), rel=1e-5)  # type: ignore[index]


class Anonymous(threading.Thread):
    """Follows this process's anonymous memory; `peak` is the most of it since the start, in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._start, self.peak = anonymous_bytes(), 0
        self._is_over = threading.Event()

    def run(self) -> None:
        while not self._is_over.wait(0.002):
            self.peak = max(self.peak, anonymous_bytes() - self._start)

    def stop(self) -> int:
        self._is_over.set()
        self.join()
        return self.peak


def anonymous_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def wide() -> nn.Module:
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(50))
    model.requires_grad_(False)
    model.head = nn.Linear(1024, 10)
    return model


def start_peak(group: Group) -> tuple[int, int]:
    """Of making a model and its shards, and what it may be: 3 of 4 parts of the params here, or 1."""
    made_in_parts(MODELS["plain"])
    watch = Anonymous()
    watch.start()
    blueprint = dry_run(wide)
    assert blueprint is not None
    strategy = FSDP(blueprint.model, lambda params: torch.optim.SGD(params, lr=0.1), group, shares=(3, 1))
    blueprint.make(seed, strategy.put)
    own = blueprint.nbytes * (3, 1)[group.rank] // 4
    return watch.stop(), int(1.05 * (own + (32 << 20) + 4 * 1025 * 1024))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux says what memory is anonymous")
def test_a_rank_never_has_more_than_its_shards_and_what_was_used_last(tmp_path: Path) -> None:
    for peak, most in on_processes(2, f"{__name__}:start_peak", tmp_path):
        assert 0 < peak <= most
