"""Clips of moving characters: what a class does is what its frames show, and a list names them."""

import numpy as np
import pytest

from demo.make_motion import MOTIONS, MotionOptions, _path, make_motion
from recipes.kinetics.video import ClipList


@pytest.mark.parametrize(
    ("motion", "value", "sign"),
    [
        ("left", "x", -1), ("right", "x", 1), ("up", "y", -1), ("down", "y", 1), ("turning_left", "angle", 1),
        ("turning_right", "angle", -1), ("growing", "size", 1), ("shrinking", "size", -1),
    ],
)  # fmt: skip
def test_what_moves(motion, value, sign):
    path = _path(motion, 72, 80, np.random.default_rng(0))
    assert (np.sign(np.diff(getattr(path, value))) == sign).all()
    still = {"x", "y", "angle", "size", "light"} - ({"x", "y"} if value in "xy" else {value})
    assert all(np.ptp(getattr(path, name)) == 0 for name in still)


def test_clips_and_their_list(tmp_path):
    options = MotionOptions(tmp_path / "motion", num_train=12, num_val=12, num_frames=10, jobs=1)
    make_motion(options)
    names = (options.out / "classes.txt").read_text().split()
    assert names == sorted(MOTIONS)
    for split in ("train", "val"):
        source = ClipList(options.out / f"{split}.txt", options.out, len(names), videos=True)
        source.check_present(12)
        assert sorted(source.labels()) == list(range(12))
        frames = [frame for _, frame in source.read(names.index("right")).image.read(range)]
        assert len(frames) == 10
        assert frames[0].shape == (72, 72, 3)
        assert np.abs(frames[0].astype(int) - frames[-1]).mean() > 2
    with pytest.raises(ValueError, match="there and not empty"):
        make_motion(options)
