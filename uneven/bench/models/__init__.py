"""The benchmark models, one small file each. `get(name)` imports only the one asked for."""

from importlib import import_module

from uneven.bench.models.recipe import Recipe
from uneven.errors import InputError

_FILES = {
    "logistic": "logistic",
    "mlp": "mlp",
    "lenet": "lenet",
    "conv-ae": "conv_ae",
    "char-rnn": "char_rnn",
    "gpt-nano": "gpt_nano",
    "resnet-20": "resnet20",
    "resnet-graph": "resnet_graph",
}
NAMES = tuple(_FILES)


def get(name: str) -> Recipe:
    if name not in _FILES:
        raise InputError(f"unknown model {name!r}: choose one of {', '.join(NAMES)}; run 'uneven bench list'")
    recipe: Recipe = import_module(f"uneven.bench.models.{_FILES[name]}").RECIPE
    return recipe
