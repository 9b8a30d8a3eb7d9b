"""The same in steps: a method for each setting, and `.run()` returns while the run is still training."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from uneven import Ddp
from uneven.data import datasets

digits = datasets.load("mnist-mini")
images = torch.from_numpy(digits.train_images).float() / 255
train_set = TensorDataset(images, torch.from_numpy(digits.train_labels))
test = torch.from_numpy(digits.test_images).float() / 255
test_set = TensorDataset(test, torch.from_numpy(digits.test_labels))


def make_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def train_step(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def eval_step(model, batch):
    return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).sum()}, len(batch[1])


run = (
    Ddp.builder(make_model, torch.optim.Adam, train_step)
    .dataset(train_set)
    .evaluate(test_set, eval_step)
    .batch_size(32)
    .epochs(3)
    .policy("balanced")
    .run()
)
state = run.join()

if Ddp.rank() == 0:
    print(f"accuracy {state.history[-1]['accuracy']:.3f}")
