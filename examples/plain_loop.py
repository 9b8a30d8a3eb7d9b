import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

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


model = Net()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(2):
    for batch in DataLoader(train_set, batch_size=64, shuffle=True):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()

test = torch.from_numpy(digits.test_images).float() / 255
right = (model(test).argmax(1) == torch.from_numpy(digits.test_labels)).float().mean()
print(f"accuracy {right:.3f}")
