"""Random crop and flip, drawn per image from its key: the same whatever the batch, rank or device."""

import torch
from torch import Tensor
from torch.nn import functional as F

from uneven.data.tensors import key_integers


def crop_and_flip(images: Tensor, keys: Tensor, padding: int = 4) -> Tensor:
    """Zero-pad by `padding`, crop back to size at a random offset, mirror half of the images.

    images: [N, C, H, W]; keys: int64 [N]. Each image has its own offset and its own coin.
    """
    height, width = images.shape[-2:]
    span = 2 * padding + 1
    top, left = key_integers(keys, 0, span), key_integers(keys, 1, span)
    flip = key_integers(keys, 2, 2).bool()
    rows = top[:, None] + torch.arange(height, device=images.device)
    across = torch.arange(width, device=images.device)
    columns = left[:, None] + torch.where(flip[:, None], width - 1 - across, across)
    padded = F.pad(images, (padding,) * 4)
    return padded[
        torch.arange(len(images), device=images.device)[:, None, None],
        :,
        rows[:, :, None],
        columns[:, None, :],
    ].permute(0, 3, 1, 2)
