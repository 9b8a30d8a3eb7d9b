"""One call: `fit` owns the loop. On several devices: uneven run examples/fit.py --devices cpu,cpu@0.4"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from uneven import Ddp, fit
from uneven.data import datasets

digits = datasets.load("mnist-mini")
images = torch.from_numpy(digits.train_images).float() / 255
train_set = TensorDataset(images, torch.from_numpy(digits.train_labels))


def make_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def train_step(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


state = fit(model=make_model, optimizer=torch.optim.Adam, step=train_step, dataset=train_set, batch_size=32, epochs=3)

if Ddp.rank() == 0:
    model = state.load_into(make_model())
    test = torch.from_numpy(digits.test_images).float() / 255
    right = (model(test).argmax(1) == torch.from_numpy(digits.test_labels)).float().mean()
    print(f"accuracy {right:.3f}")
