import pytest
import torch
from torch.nn import functional as F

from uneven import InputError, TensorData
from uneven.data.sample_order import sample_keys
from uneven.data.tensors import crop_and_flip, key_integers, key_normals


def test_take_gathers_rows_and_applies_the_transform_with_its_keys() -> None:
    data = TensorData(torch.arange(5) * 10, torch.arange(5), transform=lambda rows, keys: (rows[0] + keys, rows[1]))
    tens, ones = data.take(torch.tensor([4, 0]), torch.tensor([1, 2]))
    assert tens.tolist() == [41, 2]
    assert ones.tolist() == [4, 0]


def test_one_tensor_gives_a_bare_tensor() -> None:
    assert TensorData(torch.arange(3)).take(torch.tensor([2]), None).tolist() == [2]


def test_a_sample_is_what_evaluation_sees() -> None:
    data = TensorData(torch.arange(4.0), torch.arange(4), transform=lambda rows, keys: (rows[0] / 2, rows[1]))
    assert [part.item() for part in data[3]] == [1.5, 3]


def test_first_shares_memory_and_keeps_the_transform() -> None:
    data = TensorData(torch.arange(6), transform=lambda rows, keys: -rows[0])
    part = data.first(2)
    assert len(part) == 2
    assert part.tensors[0].data_ptr() == data.tensors[0].data_ptr()
    assert part.take(torch.tensor([1]), None).tolist() == [-1]


@pytest.mark.parametrize("tensors", [(), (torch.zeros(2), torch.zeros(3))])
def test_unequal_lengths_are_refused(tensors: tuple[torch.Tensor, ...]) -> None:
    with pytest.raises(InputError, match="common length"):
        TensorData(*tensors)


def test_key_integers_are_uniform_and_streams_are_independent() -> None:
    keys = torch.from_numpy(sample_keys(0, 0, 90_000))
    rows, columns = key_integers(keys, 0, 9), key_integers(keys, 1, 9)
    counts = torch.bincount(rows * 9 + columns, minlength=81)
    assert counts.sum() == 90_000
    # Expected 1,111 a cell with a standard deviation of 33; 6 of those over 81 cells is beyond chance.
    assert counts.min() > 1_111 - 200
    assert counts.max() < 1_111 + 200


def test_key_normals_are_standard_normal_and_independent() -> None:
    keys = torch.from_numpy(sample_keys(0, 0, 4000))
    found = key_normals(keys, 0, (3, 5)).double()
    assert found.shape == (4000, 3, 5)
    columns = torch.cat([found.flatten(1), key_normals(keys, 1, (5,)).double()], dim=1)
    # Of 4000 draws a mean has a standard deviation of 0.016, a product's as well, a fourth power's of 0.16.
    assert columns.mean(0).abs().max() < 0.08
    products = columns.T @ columns / 4000
    assert (products - torch.eye(20)).abs().max() < 0.12
    assert ((columns**4).mean(0) - 3).abs().max() < 1.0
    inside = (columns.abs() < 1).double().mean()
    assert abs(inside - 0.6827) < 0.01


def test_key_normals_depend_on_the_key_alone() -> None:
    keys = torch.from_numpy(sample_keys(0, 0, 10))
    whole = key_normals(keys, 3, (1, 7, 5))
    parts = torch.cat([key_normals(keys[:3], 3, (1, 7, 5)), key_normals(keys[3:], 3, (1, 7, 5))])
    assert torch.equal(whole, parts)
    assert len(set(whole.flatten().tolist())) > 345
    assert not torch.equal(whole, key_normals(keys, 4, (1, 7, 5)))


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
