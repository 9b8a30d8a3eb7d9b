"""A small diffusion model of digits: uneven run examples/diffusion.py --devices cpu,cpu@0.4

A U-Net learns the way from noise to an image (rectified flow), and draws with the moving average of its params (EMA).
The noise of a sample is drawn from its key, so it does not matter which device trains the sample: the params are those
of one device, whatever the shares. About a minute on two cores.
"""

import argparse
import math
from pathlib import Path

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from uneven import TensorData, fit
from uneven.data import datasets
from uneven.data.tensors import key_integers, key_normals

TIMES, SIZE = 200, 14  # times from image to noise; images in pixels
torch.set_num_threads(1)  # more of them only wait for each other at this size


class Block(nn.Module):
    """Two convolutions, between which time and digit scale and shift the channels."""

    def __init__(self, before, after, condition):
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(8, before), nn.GroupNorm(8, after)])
        self.first, self.second = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
        self.modulate = nn.Linear(condition, 2 * after)
        self.around = nn.Conv2d(before, after, 1)

    def forward(self, x, condition):
        scale, shift = self.modulate(condition)[:, :, None, None].chunk(2, dim=1)
        inside = self.norms[1](self.first(F.silu(self.norms[0](x)))) * (1 + scale) + shift
        return self.around(x) + self.second(F.silu(inside))


class UNet(nn.Module):
    """At full size, at half of it, and back; `width` channels."""

    def __init__(self, width=32):
        super().__init__()
        self.width = width
        self.digits = nn.Embedding(10, width)
        self.times = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.begin, self.end = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 1, 3, padding=1)
        self.down, self.up = Block(width, width, width), Block(3 * width, width, width)
        self.inside = nn.ModuleList([Block(width, 2 * width, width), Block(2 * width, 2 * width, width)])

    def forward(self, images, times, digits):
        rates = torch.exp(-math.log(1e4) * torch.arange(self.width // 2, device=images.device) / (self.width // 2))
        angles = (times[:, None] * rates).to(images.dtype)
        condition = F.silu(self.times(torch.cat([angles.sin(), angles.cos()], dim=1)) + self.digits(digits))
        outer = self.down(self.begin(images), condition)
        inner = F.avg_pool2d(outer, 2)
        for block in self.inside:
            inner = block(inner, condition)
        return self.end(self.up(torch.cat([outer, F.interpolate(inner, scale_factor=2.0)], dim=1), condition))


class Averaged(nn.Module):
    """A model with the moving average of its params, which computes in eval mode.

    As buffers the averages are saved, resumed and the same on all devices. `update` is called before each step of the
    optimizer on every device, also on one that has no samples in it.
    """

    def __init__(self, model, decay):
        super().__init__()
        self.model, self.decay = model, decay
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        for place, param in enumerate(model.parameters()):
            self.register_buffer(f"average_{place}", param.detach().clone())

    def averages(self):
        names = dict(self.model.named_parameters())
        return {name: self.get_buffer(f"average_{place}") for place, name in enumerate(names)}

    def forward(self, *inputs):
        return self.model(*inputs) if self.training else functional_call(self.model, self.averages(), inputs)

    @torch.no_grad()
    def update(self):
        weight = 1 - self.decay * (self.updates > 0).double()  # at first the params themselves
        for param, average in zip(self.model.parameters(), self.averages().values(), strict=True):
            average.lerp_(param, weight.to(param.dtype))
        self.updates += 1


def with_noise(rows, keys):
    """Images on their way to noise, how far they are, digits, and the way to learn. Evaluation has no keys."""
    images, digits, numbers = rows
    keys = numbers if keys is None else keys
    images = F.avg_pool2d(images.float(), 28 // SIZE) / 127.5 - 1
    noise, times = key_normals(keys, 0, images.shape[1:]), key_integers(keys, 0, TIMES) + 1
    part = (times / TIMES)[:, None, None, None]
    return (1 - part) * images + part * noise, times, digits, noise - images


def loss_of(model, batch):
    images, times, digits, way = batch
    return F.mse_loss(model(images, times, digits), way)


def test_step(model, batch):
    return {"loss": loss_of(model, batch) * len(batch[0])}, len(batch[0])


@torch.no_grad()
def draw(model, digits, steps=50):
    """Images of these digits, from noise alone."""
    images = torch.randn(len(digits), 1, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    for time in range(TIMES, 0, -TIMES // steps):
        images -= model(images, torch.full((len(digits),), time), digits) / steps
    return images.clamp(-1, 1)


def write_image(path, images):
    """Rows of ten images as one file, which every viewer of images reads."""
    rows = (images[:, 0] * 127.5 + 127.5).byte().view(-1, 10, SIZE, SIZE).permute(0, 2, 1, 3).reshape(-1, 10 * SIZE)
    path.write_bytes(b"P5 %d %d 255\n" % (rows.shape[1], rows.shape[0]) + bytes(rows.flatten().tolist()))


def data_of(images, digits):
    numbers = torch.arange(len(images))
    return TensorData(torch.from_numpy(images), torch.from_numpy(digits).long(), numbers, transform=with_noise)


def make_model():
    return Averaged(UNet(), decay=0.99)


def adam(params):
    return torch.optim.AdamW(params, lr=2e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=10_000, help="images of an epoch")
    parser.add_argument("--image", type=Path, default=Path("digits.pgm"), help="where digits that it draws are written")
    args = parser.parse_args()
    mnist = datasets.load("mnist-mini")
    state = fit(
        model=make_model,
        optimizer=adam,
        step=loss_of,
        dataset=data_of(mnist.train_images, mnist.train_labels).first(args.samples),
        evaluate=(data_of(mnist.test_images, mnist.test_labels), test_step),
        batch_size=64,
        epochs=args.epochs,
        max_grad_norm=1.0,
        before_step=Averaged.update,
    )
    model = state.load_into(make_model()).eval()
    write_image(args.image, draw(model, torch.arange(10).repeat(3)))
    print(f"{args.image} has three rows of digits")
