"""CRC-32 by the C++ kernel's library is zlib's, with every instruction set that this processor has."""

import random
import zlib

import pytest
import torch

from partial_fc.checkpoint import crc32
from partial_fc.head.kernels.cpu import load


@pytest.mark.parametrize("width", [8, 128, 512])
def test_every_width_makes_the_numbers_of_zlib(width):
    """... of what takes none of the loops, some of them, or all."""
    compiled = load("portable")
    if width > compiled.head_crc32_width():
        pytest.skip("this processor folds fewer bits at a time")
    draw = random.Random(width)
    data = torch.frombuffer(bytearray(draw.randbytes(300_000)), dtype=torch.uint8)
    functions = crc32.by_width(compiled, width)
    for num_bytes in [
        *range(1, 600),
        *(draw.randrange(600, 2900) for _ in range(100)),
        *(draw.randrange(60_000, 299_000) for _ in range(30)),
    ]:
        begin, to, before = draw.randrange(100), draw.randrange(1, 100), draw.randrange(1 << 32)
        part, target = data[begin : begin + num_bytes], torch.zeros(num_bytes + 200, dtype=torch.uint8)
        expected = zlib.crc32(part.numpy().data, before)
        assert functions.update(before, part.data_ptr(), num_bytes) == expected
        assert functions.copy(before, target[to:].data_ptr(), part.data_ptr(), num_bytes) == expected
        assert torch.equal(target[to : to + num_bytes], part)
        assert not target[:to].any()
        assert not target[to + num_bytes :].any()


@pytest.mark.parametrize("compiler", [True, False])
def test_a_copy_comes_with_its_checksum(monkeypatch, compiler):
    if not compiler:
        monkeypatch.setattr(crc32, "_functions", lambda: crc32.BY_ZLIB)
    monkeypatch.setattr(crc32, "_BLOCK", 1000)
    for t in (torch.randn(321, 7).bfloat16(), torch.randn(6, 5).T, torch.tensor(3), torch.empty(0, 4)):
        own, crc = crc32.copied(t)
        assert torch.equal(own, t)
        assert t.numel() == 0 or own.data_ptr() != t.data_ptr()
        as_bytes = bytes(t.contiguous().reshape(-1).view(torch.uint8).tolist())
        assert crc == crc32.crc32(t) == zlib.crc32(as_bytes)
