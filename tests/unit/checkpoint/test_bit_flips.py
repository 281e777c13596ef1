"""Bits that turn in commits: a few of those of `make torture`, and the CRC-32 that finds them, which is zlib's."""

import zlib

import pytest
import torch

from partial_fc.checkpoint import crc32
from tests.faults.bit_flips import attack


def test_turned_bits_are_found_and_nothing_damaged_is_gone_on_from():
    assert attack(flips=32, seed=1)["flips"] >= 32


TENSORS = (torch.randn(321, 7).bfloat16(), torch.randn(6, 5).T, torch.tensor(3), torch.empty(0, 4))


@pytest.mark.parametrize("block", [1000, 1 << 22])
def test_a_copy_comes_with_its_checksum(monkeypatch, block):
    monkeypatch.setattr(crc32, "_BLOCK", block)
    for t in TENSORS:
        own, crc = crc32.copied(t)
        assert torch.equal(own, t)
        assert t.numel() == 0 or own.data_ptr() != t.data_ptr()
        as_bytes = bytes(t.contiguous().reshape(-1).view(torch.uint8).tolist())
        assert crc == crc32.crc32(t) == zlib.crc32(as_bytes)
        assert crc32.crc32(t, 7) == zlib.crc32(as_bytes, 7)
