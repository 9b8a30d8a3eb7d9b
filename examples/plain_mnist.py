"""Digits as most people train them: argparse, a loop, a test after every epoch, the model saved at the end."""

import argparse

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from uneven.data import datasets


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 5, stride=2)
        self.conv2 = nn.Conv2d(8, 16, 5, stride=2)
        self.fc = nn.Linear(256, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        return F.log_softmax(self.fc(x.flatten(1)), dim=1)


def test(model, device, test_loader):
    model.eval()
    loss, right = 0.0, 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            loss += F.nll_loss(output, target, reduction="sum").item()
            right += (output.argmax(1) == target).sum().item()
    samples = len(test_loader.dataset)
    print(f"test loss {loss / samples:.4f} accuracy {right / samples:.3f}")


def main():
    parser = argparse.ArgumentParser(description="digits")
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--test-batch-size", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--samples", type=int, default=10000, help="train on the first so many digits")
    parser.add_argument("--log-interval", type=int, default=50)
    parser.add_argument("--save-model", help="file for the trained model")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    digits = datasets.load("mnist-mini")
    images, labels = torch.from_numpy(digits.train_images).float() / 255, torch.from_numpy(digits.train_labels)
    train_set = TensorDataset(images[: args.samples], labels[: args.samples])
    test_set = TensorDataset(torch.from_numpy(digits.test_images).float() / 255, torch.from_numpy(digits.test_labels))
    shuffled = torch.Generator().manual_seed(args.seed)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True, generator=shuffled)
    test_loader = DataLoader(test_set, batch_size=args.test_batch_size)

    model = Net().to(device)
    optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    for epoch in range(args.epochs):
        model.train()
        for batch_idx, (data, target) in enumerate(train_loader):
            data, target = data.to(device), target.to(device)
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            if batch_idx % args.log_interval == 0:
                print(f"epoch {epoch} batch {batch_idx} loss {loss.item():.4f}")
        test(model, device, test_loader)

    if args.save_model:
        torch.save(model.state_dict(), args.save_model)


main()
