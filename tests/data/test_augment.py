import torch
from torch.nn import functional as F

from uneven.data.augment import crop_and_flip
from uneven.data.ledger import sample_keys
from uneven.data.tensors import key_integers


def plain_crop_and_flip(image: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The textbook form, one image at a time."""
    top, left, flip = (int(key_integers(key, stream, high)) for stream, high in ((0, 9), (1, 9), (2, 2)))
    crop = F.pad(image, (4, 4, 4, 4))[:, top : top + 32, left : left + 32]
    return crop.flip(-1) if flip else crop


def test_equals_the_textbook_form_image_by_image() -> None:
    images = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8)
    keys = torch.from_numpy(sample_keys(1, 2, 64))
    together = crop_and_flip(images, keys)
    for image, key, result in zip(images, keys, together, strict=True):
        assert torch.equal(plain_crop_and_flip(image, key), result)


def test_an_image_is_cropped_the_same_in_any_batch() -> None:
    images = torch.rand(10, 3, 32, 32)
    keys = torch.from_numpy(sample_keys(0, 0, 10))
    whole = crop_and_flip(images, keys)
    parts = torch.cat([crop_and_flip(images[:3], keys[:3]), crop_and_flip(images[3:], keys[3:])])
    assert torch.equal(whole, parts)


def test_images_of_one_batch_differ_in_offset_and_flip() -> None:
    keys = torch.from_numpy(sample_keys(0, 0, 200))
    ramp = torch.arange(32 * 32.0).view(1, 1, 32, 32).expand(200, 1, 32, 32) + 1
    assert len({tuple(image.flatten().tolist()) for image in crop_and_flip(ramp, keys)}) > 100
