"""The large models: params as the published checkpoints name them, and each learns what it is shown."""

import pytest
import torch
from torch import Tensor, nn

from uneven.bench import models
from uneven.bench.models.gpt2 import Gpt2, Size
from uneven.bench.models.sets import KINDS, load_set

TINY = Size(width=32, blocks=2, heads=4, vocabulary=16, window=8)
SHAPES = {  # one of each kind of layer, as torchvision and transformers have them
    "gpt2": {
        "transformer.wte.weight": (50_257, 768),
        "transformer.wpe.weight": (1024, 768),
        "transformer.h.11.attn.c_attn.weight": (768, 2304),
        "transformer.h.0.mlp.c_proj.bias": (768,),
        "transformer.ln_f.bias": (768,),
        "lm_head.weight": (50_257, 768),
    },
    "resnet-18": {
        "layer1.0.conv2.weight": (64, 64, 3, 3),
        "layer2.0.downsample.0.weight": (128, 64, 1, 1),
        "layer4.1.bn2.running_var": (512,),
        "fc.weight": (1000, 512),
    },
    "resnet-50": {
        "conv1.weight": (64, 3, 7, 7),
        "layer1.0.downsample.1.weight": (256,),
        "layer3.5.conv3.weight": (1024, 256, 1, 1),
        "fc.weight": (1000, 2048),
    },
    "vit-b16": {
        "class_token": (1, 1, 768),
        "conv_proj.weight": (768, 3, 16, 16),
        "encoder.pos_embedding": (1, 197, 768),
        "encoder.layers.encoder_layer_11.self_attention.in_proj_weight": (2304, 768),
        "encoder.layers.encoder_layer_0.mlp.3.weight": (768, 3072),
        "encoder.ln.weight": (768,),
        "heads.head.bias": (1000,),
    },
}


def make(name: str) -> nn.Module:
    with torch.device("meta"):
        return models.get(name).make_model()


@pytest.mark.parametrize("name", models.LARGE)
def test_param_count(name: str) -> None:
    assert sum(param.numel() for param in make(name).parameters()) == models.get(name).num_params


@pytest.mark.parametrize("name", SHAPES)
def test_names_and_shapes_of_published_checkpoints(name: str) -> None:
    state = make(name).state_dict()
    assert {key: tuple(state[key].shape) for key in SHAPES[name]} == SHAPES[name]


def test_gpt2_has_the_numbers_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=16, n_positions=8, n_embd=32, n_layer=2, n_head=4)
    theirs = transformers.GPT2LMHeadModel(config).double().eval()
    ours = Gpt2(TINY).double()
    assert not any(ours.load_state_dict(theirs.state_dict()))
    tokens = torch.arange(16).view(2, 8)
    assert torch.allclose(ours(tokens), theirs(tokens).logits, atol=1e-12)


def losses_of(model: nn.Module, name: str, batch: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Of one batch, before and after eight steps on it."""
    recipe = models.get(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = []
    for _ in range(9):
        loss = recipe.train_step(model, batch)
        seen.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return seen[0], seen[-1]


@pytest.mark.parametrize("name", ["resnet-18", "resnet-50"])
def test_a_resnet_learns_its_batch_by_heart(name: str) -> None:
    images = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    before, after = losses_of(models.get(name).make_model(), name, (images, torch.arange(4)))
    assert after < before


def test_gpt2_learns_its_batch_by_heart_and_cannot_see_the_future() -> None:
    model = Gpt2(TINY)
    tokens = torch.arange(8).view(1, 8)
    before, after = losses_of(model, "gpt2", (tokens, tokens + 1))
    assert after < before
    changed = tokens.clone()
    changed[0, 5] = 15
    assert torch.allclose(model(tokens)[0, :5], model(changed)[0, :5], atol=1e-6)
    assert not torch.allclose(model(tokens)[0, 5:], model(changed)[0, 5:], atol=1e-6)


@pytest.mark.parametrize("name", models.LARGE)
def test_its_data_set_is_known(name: str) -> None:
    assert models.get(name).data in KINDS


def test_random_images_are_the_same_every_time() -> None:
    found = load_set("random-224")
    (images, labels), (again, _) = (load_set("random-224").train.take(torch.arange(2), None) for _ in range(2))
    assert torch.equal(images, again)
    assert (images.shape, images.dtype) == ((2, 3, 224, 224), torch.float32)
    assert int(labels.max()) < 1000
    assert found.kind == "224x224"
