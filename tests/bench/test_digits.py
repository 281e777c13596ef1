"""scikit-learn's digits as MNIST's files."""

import hashlib
from typing import Any

import numpy as np
import pytest

from demo.make_digits import NUM_TRAIN, DigitsOptions, load, write_digits
from partial_fc.data.idx import read_set


@pytest.fixture(scope="module")
def scans() -> Any:
    # Imported here: every process collects this file, one runs it.
    from sklearn.datasets import load_digits

    return load_digits()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("digits") / "new"
    write_digits(DigitsOptions(out=out))
    return out


def test_every_scan_is_in_one_of_the_two_sets(folder, scans):
    train, test = read_set(folder, "train"), read_set(folder, "t10k")
    assert len(train.label_N) == NUM_TRAIN == 1287
    assert len(test.label_N) == 510
    np.testing.assert_array_equal(np.concatenate((train.label_N, test.label_N)), scans.target)
    assert set(test.label_N) == set(range(10))


def test_same_bytes_on_every_machine():
    """The pixels are whole-number arithmetic; this is what they come to: white on black, in the middle of 28 x 28."""
    digest = hashlib.sha256(b"".join(load()[split].image_NHW.tobytes() for split in ("train", "t10k"))).hexdigest()
    assert digest == "7cbf506a7606c259dd6afef1f8b27a9cb0808761bae0984671f64c1f8b03c975"
