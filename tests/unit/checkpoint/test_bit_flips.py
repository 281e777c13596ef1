"""Bits that turn in commits: a few of those of `make torture`."""

from tests.faults.bit_flips import attack


def test_turned_bits_are_found_and_nothing_damaged_is_gone_on_from():
    assert attack(flips=32, seed=1)["flips"] >= 32
