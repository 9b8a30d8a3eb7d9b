import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from uneven import fit
from uneven.data import datasets

digits = datasets.load("mnist-mini")
images = torch.from_numpy(digits.train_images).float() / 255
train_set = TensorDataset(images, torch.from_numpy(digits.train_labels))


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def loss_of(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


state = fit(model=Net, optimizer=torch.optim.Adam, step=loss_of, dataset=train_set, batch_size=64, epochs=2)
model = state.load_into(Net())

test = torch.from_numpy(digits.test_images).float() / 255
right = (model(test).argmax(1) == torch.from_numpy(digits.test_labels)).float().mean()
print(f"accuracy {right:.3f}")
