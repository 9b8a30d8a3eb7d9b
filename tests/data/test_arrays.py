"""The canonical files become the arrays that were put into them."""

import numpy as np
import pytest

from tests.data import tiny_sets
from uneven.data.arrays import format_idx, images_from_cifar_batches, parse_idx, tokens_from_text


@pytest.mark.parametrize("shape", [(5,), (3, 28, 28)])
def test_idx_round_trip(shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    assert np.array_equal(parse_idx(format_idx(array)), array)


def test_idx_header_is_the_official_one() -> None:
    assert format_idx(np.zeros((60000, 28, 0), np.uint8)).hex() == "00000803" + "0000ea60" + "0000001c" + "00000000"


@pytest.mark.parametrize("content", [b"", b"\0\0\x0d\x01" + bytes(8), format_idx(np.zeros((2, 2), np.uint8))[:-1]])
def test_what_is_no_idx_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError):
        parse_idx(content)


def test_cifar_batches_keep_their_order_and_become_planes() -> None:
    # In reverse, because an archive may hold them in any order.
    arrays = images_from_cifar_batches(reversed(tiny_sets.PHOTO_FILES.items()))
    pixels = tiny_sets.PHOTOS.reshape(6, -1, 32, 32, 3).transpose(0, 1, 4, 2, 3)
    assert np.array_equal(arrays.train_images, pixels[:5].reshape(-1, 3, 32, 32))
    assert np.array_equal(arrays.test_images, pixels[5])
    assert np.array_equal(arrays.train_labels, tiny_sets.PHOTO_LABELS[:5].reshape(-1))
    assert np.array_equal(arrays.test_labels, tiny_sets.PHOTO_LABELS[5])
    for array in (arrays.train_images, arrays.test_images):
        # torch.from_numpy warns about read-only arrays, and strided ones are slow to index.
        assert array.flags.writeable
        assert array.flags.c_contiguous


def test_text_tokens_spell_the_text_and_split_by_position() -> None:
    text = tokens_from_text([("play.txt", tiny_sets.TEXT)])
    assert text.text == tiny_sets.TEXT.decode()
    assert text.vocabulary == "".join(sorted(set(text.text)))
    assert "".join(text.vocabulary[token] for token in text.tokens) == text.text
    assert len(text.train_tokens) == 17  # 90 % of 19, rounded down
    assert np.array_equal(np.concatenate([text.train_tokens, text.validation_tokens]), text.tokens)
