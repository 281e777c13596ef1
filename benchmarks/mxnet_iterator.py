"""One process of `python -m benchmarks.data`: MXNet's ImageRecordIter, whose handlers would be those of its process."""

import json
import sys
from pathlib import Path

from benchmarks.data import timed


def main(rec: str, size: int, batch_size: int, mirrored: bool, count: int, width: int) -> None:
    from recipes.mxnet.library import mx

    batches = mx.io.ImageRecordIter(
        path_imgrec=rec,
        path_imgidx=str(Path(rec).with_suffix(".idx")),
        data_shape=(3, size, size),
        batch_size=batch_size,
        label_width=width,
        rand_mirror=mirrored,
        shuffle=True,
        preprocess_threads=1,
        verbose=False,
    )
    num = max(1, count // batch_size)

    def take() -> None:
        for _ in range(num):
            try:
                batch = next(batches)
            except StopIteration:
                batches.reset()
                batch = next(batches)
            batch.data[0].wait_to_read()

    take()
    speed = timed(take)
    share = count / (num * batch_size)
    print(json.dumps([speed.wall_s * share, speed.cpu_s * share]))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
