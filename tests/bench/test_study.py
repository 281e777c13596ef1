"""The statistics, labels and replicates of the studies on glyphs."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn.functional import normalize

from benchmarks import fidelity
from benchmarks.study import measure, sets
from benchmarks.study.run import ROOT
from benchmarks.study.statistics import Results, holm, interval, sign_flip
from partial_fc.data.recordio import RecordReader, RecordWriter, pack


def test_sign_flip_is_exact():
    value = np.random.default_rng(0).standard_normal(9) - 0.4
    found = stats.permutation_test(
        (value,), np.mean, permutation_type="samples", alternative="less", n_resamples=2**9, vectorized=False
    )
    assert sign_flip(value) == pytest.approx(found.pvalue)
    assert sign_flip(np.full(6, -1.0)) == 1 / 64


def test_holm_is_that_of_the_paper():
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06})


@pytest.mark.parametrize("seeds", [3, 6, 7])
def test_an_interval_of_few_seeds_covers_the_mean_as_often_as_it_says(seeds):
    """Of 1,000 samples, whose share differs by 0.7 % from the truth's; BCa's were 74 to 87 %."""
    bounds = np.array([interval(value) for value in np.random.default_rng(1).normal(0.3, 0.05, (1000, seeds))])
    assert 0.93 < ((bounds[:, 0] <= 0.3) & (bounds[:, 1] >= 0.3)).mean() < 0.97
    assert np.isnan(interval(np.zeros(2))).all()


def test_replicates_equal_a_computation_with_copies_of_the_images():
    rng = np.random.default_rng(2)
    label_N = np.sort(rng.integers(0, 60, 400))
    noise = torch.from_numpy(rng.standard_normal((400, 16), np.float32))
    centre = torch.from_numpy(rng.standard_normal((60, 16), np.float32))
    row_ND = normalize(centre[label_N] + 0.6 * noise).numpy()
    found = measure.replicates(row_ND, label_N, -2.0, rates=("1e-2", "1e-3"), number=3)
    for b in range(3):
        drawn = np.random.default_rng((7, b)).integers(0, label_N.max() + 1, label_N.max() + 1)
        copies = [np.flatnonzero(label_N == code) for code in drawn]
        of, place = np.concatenate(copies), np.repeat(np.arange(len(drawn)), [len(rows) for rows in copies])
        cosine = row_ND[of] @ row_ND[of].T
        pair = np.triu(np.ones_like(cosine, bool), 1)
        genuine = cosine[pair & (place[:, None] == place)]
        impostor = np.sort(cosine[pair & (label_N[of][:, None] != label_N[of])])[::-1]
        for far in ("1e-2", "1e-3"):
            bound = impostor[int(float(far) * len(impostor))]
            assert found[far][b] == pytest.approx((genuine <= bound).mean(), abs=1e-7)


def test_a_set_under_other_labels_has_the_same_images(tmp_path):
    (tmp_path / "a").mkdir()
    with RecordWriter(tmp_path / "a/train.rec") as records:
        for key in range(1, 7):
            records.write(key, pack((key // 3, 1.0), bytes([key]) * key, id=key))
    lines = [f"1\t{key:x}/face-0.jpg\t{key // 3}" for key in range(1, 7)]
    (tmp_path / "a/train.lst").write_text("\n".join(lines) + "\n")
    (tmp_path / "b").mkdir()
    sets.relabel(tmp_path / "a", tmp_path / "b", np.array([0, 3, -1, 1, 1, 2]))
    reader = RecordReader(tmp_path / "b/train.rec")
    content = [reader.read_sample(key) for key in reader.keys]
    assert [(int(header.label[0]), image) for header, image in content] == [
        (new, bytes([key]) * key) for key, new in zip((1, 2, 4, 5, 6), (0, 3, 1, 1, 2), strict=True)
    ]
    assert np.load(tmp_path / "b/original.npy").tolist() == [0, 1, 2, 0]


def test_pages_are_those_of_the_results():
    """python -m benchmarks.fidelity --analyse writes the pages."""
    results = Results.read(ROOT / "benchmarks/results/fidelity")
    for page, tables in fidelity.pages(results).items():
        text = (ROOT / page).read_text()
        assert fidelity.between(text, tables) == text
