"""The benchmark models. `get(name)` imports only the file of the one asked for.

A sweep trains those of the suite, for their quality. The large ones are of the size that people bring, and are measured
for their speed, by name.
"""

from importlib import import_module

from uneven.bench.models.recipe import Recipe
from uneven.errors import InputError

_SUITE = {
    "logistic": "mnist.LOGISTIC",
    "mlp": "mnist.MLP",
    "lenet": "mnist.LENET",
    "conv-ae": "mnist.AUTOENCODER",
    "char-rnn": "char_rnn.RECIPE",
    "gpt-nano": "gpt_nano.RECIPE",
    "resnet-20": "resnet20.RECIPE",
    "resnet-graph": "resnet_graph.RECIPE",
}
_LARGE = {
    "gpt2": "gpt2.GPT2",
    "gpt-25m": "gpt2.GPT_25M",
    "resnet-18": "resnet.RESNET18",
    "resnet-50": "resnet.RESNET50",
    "vit-b16": "vit.VIT_B16",
}
NAMES, LARGE = tuple(_SUITE), tuple(_LARGE)


def get(name: str) -> Recipe:
    place = (_SUITE | _LARGE).get(name)
    if place is None:
        known = ", ".join(NAMES + LARGE)
        raise InputError(f"unknown model {name!r}: choose one of {known}; run 'uneven bench list'")
    file, _, attribute = place.partition(".")
    recipe: Recipe = getattr(import_module(f"uneven.bench.models.{file}"), attribute)
    return recipe
