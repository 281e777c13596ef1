"""Keyed functions: bijections, uniform enough, and functions of nothing but their arguments."""

import pytest
import torch

from partial_fc import counter_rng


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 100, 255, 257, 4095, 4096, 4097])
def test_permute_is_a_permutation(size):
    for key in (0, 1, 2**32 - 1):
        assert sorted(counter_rng.permute(torch.arange(size), size, key).tolist()) == list(range(size))


@pytest.mark.parametrize("size", [5, 100, 4096])
def test_every_place_is_equally_likely(size):
    """Chi-square of where position 0 goes, over 200 keys a place: within five standard deviations."""
    num_keys = 200 * size if size < 1000 else 8 * size
    where = counter_rng.permute(torch.zeros(num_keys, 1, dtype=torch.int64), size, torch.arange(num_keys)[:, None])
    count = torch.bincount(where.flatten(), minlength=size).double()
    expected = num_keys / size
    chi_square = ((count - expected).square() / expected).sum().item()
    assert abs(chi_square - (size - 1)) < 5 * (2 * (size - 1)) ** 0.5 + 5


def test_uniform_is_uniform_and_belongs_to_its_row():
    row = torch.arange(2000) + (1 << 40)
    x = counter_rng.uniform(row, 99, key=5)
    assert 0 <= x.min() < x.max() < 1
    count = torch.histc(x, 50, 0, 1).double()
    expected = x.numel() / 50
    assert ((count - expected).square() / expected).sum() < 49 + 5 * (2 * 49) ** 0.5
    for a, b in ((x[:-1], x[1:]), (x[:, :-1], x[:, 1:]), (x, counter_rng.uniform(row, 99, key=6))):
        correlation = torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]
        assert abs(correlation) < 5 / x.numel() ** 0.5
    assert torch.equal(counter_rng.uniform(row[7:9], 99, key=5), x[7:9])


def test_normal_is_normal():
    x = counter_rng.normal(torch.arange(2000), 99, key=5)
    assert x.shape == (2000, 99)
    assert x.dtype == torch.float32
    flat = x.double().flatten()
    error = 5 / len(flat) ** 0.5
    assert abs(flat.mean()) < error
    assert abs(flat.std() - 1) < error
    assert abs((flat**4).mean() - 3) < 5 * (96 / len(flat)) ** 0.5
    assert abs((flat.abs() < 1.959964).double().mean() - 0.95) < error
    gram = x[:64].double() @ x[:64].double().T / 99
    assert (gram - torch.eye(64)).abs().max() < 0.8, "two rows are alike"


def test_normal_is_a_function_of_the_row_number():
    row = torch.tensor([7, 3, 2**40 + 7, 7])
    x = counter_rng.normal(row, 10, key=1)
    assert torch.equal(x[0], x[3])
    assert torch.equal(x[1:2], counter_rng.normal(row[1:2], 10, key=1))
    assert not torch.equal(x[0], x[2])
    assert not torch.equal(x, counter_rng.normal(row, 10, key=2))
    assert torch.equal(x, counter_rng.normal(row, 11, key=1)[:, :10]), "the width changes no number"
