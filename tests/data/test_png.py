"""The PNG decoder against pictures encoded from the format's definition, with every filter."""

import struct
import zlib

import numpy as np
import pytest

from tests.data import tiny_sets
from uneven.data import png

PIXELS = np.random.default_rng(3).integers(0, 256, (12, 9, 3), np.uint8)


@pytest.mark.parametrize("filters", [[kind] * 12 for kind in range(5)] + [[4, 3, 2, 1, 0, 2, 4, 1, 3, 4, 0, 2]])
def test_every_filter_decodes(filters: list[int]) -> None:
    assert np.array_equal(png.decode(tiny_sets.encode_png(PIXELS, filters)), PIXELS)


@pytest.mark.parametrize(("left", "up"), [(80, 110), (110, 80)])
def test_paeth_prefers_a_neighbour_to_the_corner(left: int, up: int) -> None:
    # With corner 100 the guess left + up - corner is as near to a neighbour as to the corner.
    pixels = np.asarray([[100, up], [left, 7]], np.uint8)[:, :, None].repeat(3, 2)
    assert np.array_equal(png.decode(tiny_sets.encode_png(pixels, [0, 4])), pixels)


def test_other_pictures_are_refused() -> None:
    good = tiny_sets.encode_png(PIXELS, [0] * 12)
    with pytest.raises(ValueError, match="not a PNG"):
        png.decode(b"GIF89a")
    with pytest.raises(ValueError, match="8-bit RGB"):
        png.decode(good[:24] + b"\x10" + good[25:])  # sixteen bits a channel
    with pytest.raises(ValueError, match="bytes of pixels"):
        png.decode(good[:200])
    with pytest.raises(ValueError, match="filter 7"):
        png.decode(_with_filter_seven())


def _with_filter_seven() -> bytes:
    body = zlib.compress(bytes([7, 1, 2, 3]))
    header = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + kind + content + bytes(4)
        for kind, content in ((b"IHDR", header), (b"IDAT", body))
    )
