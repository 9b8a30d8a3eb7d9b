"""torch's own DDP under torchrun, with samples by speed: the lines that uneven adds are marked.

torchrun --nproc-per-node 2 examples/torchrun_ddp.py --speeds 1,0.4
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from uneven.core import StepSampler, StepShares, watch_ddp  # uneven
from uneven.data import datasets

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=128, help="samples of a step, of all ranks together")
parser.add_argument("--checkpoint", type=Path, help="is written after every epoch, and continued if it exists")
parser.add_argument("--speeds", help="slow ranks down to try it, as in 1,0.4")
args = parser.parse_args()

if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")  # "nccl" where every rank has a GPU
else:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
rank = dist.get_rank()

digits = datasets.load("mnist-mini")
images, labels = torch.from_numpy(digits.train_images).float() / 255, torch.from_numpy(digits.train_labels)
train_set = TensorDataset(images, labels)
torch.manual_seed(0)
convolutions = nn.Conv2d(1, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 5, stride=2), nn.ReLU()
ddp = DistributedDataParallel(nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(512, 10)))
optimizer = torch.optim.Adam(ddp.parameters(), lr=0.003)

shares = StepShares(args.batch_size)  # uneven
order = DistributedSampler(train_set, num_replicas=1, rank=0)  # uneven: the order of all samples on every rank
sampler = StepSampler(order, shares)  # uneven
loader = DataLoader(train_set, batch_sampler=sampler)  # uneven: in place of batch_size and a sampler of this rank
watch_ddp(ddp, shares)  # uneven
if args.speeds:
    shares.slow_down(float(args.speeds.split(",")[rank]))  # uneven: only to try it

first = 0
if args.checkpoint and args.checkpoint.exists():
    saved = torch.load(args.checkpoint)
    ddp.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    shares.load_state_dict(saved["shares"])  # uneven
    first, sampler.skip = divmod(shares.step, sampler.steps)  # uneven

for epoch in range(first, args.epochs):
    sampler.set_epoch(epoch)
    for x, y in loader:
        step = shares.step  # uneven
        shares.start()  # uneven
        loss = F.cross_entropy(ddp(x), y)
        loss = loss * shares.factor(step, sampler.own[step, 0])  # uneven
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        shares.note(step)  # uneven
    if args.checkpoint and rank == 0:
        states = {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}
        states["shares"] = shares.state_dict()  # uneven
        torch.save(states, args.checkpoint)

if rank == 0:
    test_images = torch.from_numpy(digits.test_images).float() / 255
    with torch.no_grad():
        right = (ddp.module(test_images).argmax(1) == torch.from_numpy(digits.test_labels)).float().mean()
    print(f"shares {shares.of(shares.step)}, accuracy {right:.3f}")
dist.destroy_process_group()
