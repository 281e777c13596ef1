"""The searches and lists of real ranks equal those of one process."""

import numpy as np
import pytest
import torch

from partial_fc.comm import SingleWorld
from partial_fc.evaluate import identification
from partial_fc.evaluate.identification import search
from partial_fc.verbs.model.evaluate import _read_together

CPU = torch.device("cpu")


def test_found_by_one_process_to_the_last_bit(world, monkeypatch):
    """70 probes in blocks of 16: ranks have unequal parts."""
    monkeypatch.setattr(identification, "_PROBES_AT_ONCE", 16)
    monkeypatch.setattr(identification, "_GALLERY_AT_ONCE", 32)
    rng = np.random.default_rng(0)
    label_N = rng.integers(0, 30, 150)
    row_ND = (rng.normal(size=(30, 8))[label_N] + 0.7 * rng.normal(size=(150, 8))).astype(np.float32)
    row_ND /= np.linalg.norm(row_ND, axis=1, keepdims=True)
    gallery = label_N[70:] < 20
    given = (row_ND[:70], label_N[:70], row_ND[70:][gallery], label_N[70:][gallery])
    together = search(*given, world, CPU, name="t")
    alone = search(*given, SingleWorld(), CPU, name="t")
    for one, other in zip(vars(together).values(), vars(alone).values(), strict=True):
        np.testing.assert_array_equal(one, other)  # NaN equals NaN here
    np.testing.assert_equal(dict(together.values()), dict(alone.values()))
    assert 0.3 < dict(together.values())["rank1"] < 1


def test_another_list_on_one_host_is_an_error_on_all(world, tmp_path):
    for name in ("a.jpg", "b.jpg"):
        (tmp_path / name).touch()
    lines, last = ["a.jpg,b.jpg,same", "b.jpg,a.jpg,different"] * 5, world.size - 1
    if world.size == 1:
        (tmp_path / "pairs.csv").write_text("\n".join(lines))
        assert len(_read_together(tmp_path / "pairs.csv", None, world).same_N) == 10
        return
    for says, words in (("maybe", rf"rank {last}: .*pairs\.csv, line 4"), ("same", r"pairs\.csv names other pairs")):
        if world.rank == last:
            lines[3] = f"b.jpg,a.jpg,{says}"
        (tmp_path / "pairs.csv").write_text("\n".join(lines))
        with pytest.raises(ValueError, match=words):
            _read_together(tmp_path / "pairs.csv", None, world)
    assert world.all_reduce(torch.ones(1), name="test/in_step").item() == world.size
