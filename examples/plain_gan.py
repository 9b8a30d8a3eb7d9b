import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import data

torch.manual_seed(0)
angles = torch.rand(512) * 6.2832
points = torch.stack([angles.cos(), angles.sin()], 1) + 0.05 * torch.randn(512, 2)
train_set = data.TensorDataset(points, torch.randn(512, 4))

gen = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
disc = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(disc.parameters(), lr=1e-3, betas=(0.5, 0.999))
loader = data.DataLoader(train_set, batch_size=64, shuffle=True)


def update(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


for _ in range(8):
    for real, noise in loader:
        fake = gen(noise)
        d_loss = F.softplus(-disc(real)).mean() + F.softplus(disc(fake.detach())).mean()
        update(opt_d, d_loss)
        g_loss = F.softplus(-disc(fake)).mean()
        update(opt_g, g_loss)

with torch.no_grad():
    radius = gen(torch.randn(500, 4)).norm(dim=1)
print(f"radius {radius.mean():.2f} +- {radius.std():.2f}, the circle has 1")
