"""One iteration of `partial-fc cluster` beside one of faiss' k-means, from the same centres, in turn.

    pip install faiss-cpu
    python -m benchmarks.cluster --vectors 50000 --width 128 --clusters 2000 --threads 1

Both assign every vector to the nearest of all centres, exactly, and average those of each cluster.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import faiss
import numpy as np
import torch
import tyro
from numpy.typing import NDArray

from partial_fc import memory
from partial_fc.comm import SingleWorld
from partial_fc.embedding.clusters import Clusters, KMeans


@dataclass(frozen=True)
class Options:
    """Prints the seconds of each round, medians, and how many clusters' centres agree."""

    vectors: int = 1_000_000
    width: int = 512
    clusters: int = 100_000
    rounds: int = 3
    threads: int = 2


def main() -> None:
    options = tyro.cli(Options)
    memory.keep_freed()  # as the command does
    torch.set_num_threads(options.threads)
    faiss.omp_set_num_threads(options.threads)
    row_ND = make(options)
    start_CD = row_ND[: options.clusters].copy()
    sides: dict[str, Callable[[], NDArray[np.float32]]] = {
        "partial-fc": lambda: ours(row_ND, start_CD),
        "faiss": lambda: theirs(row_ND, start_CD),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    centres = {}
    for _ in range(options.rounds):
        for name, side in sides.items():
            started = time.perf_counter()
            centres[name] = side()
            seconds[name].append(time.perf_counter() - started)
    cosine_C = np.einsum("cd,cd->c", *centres.values())
    print(f"{options}, faiss {faiss.__version__}, torch {torch.__version__}")
    for name, taken in seconds.items():
        print(f"{name:12}{median(taken):9.2f} s   ({', '.join(f'{s:.2f}' for s in taken)})")
    print(f"{(cosine_C > 1 - 1e-5).mean():.3%} of the centres agree")


def make(options: Options) -> NDArray[np.float32]:
    """Returns vectors of length 1 in groups, as many as clusters, each with noise as long as its direction."""
    random = np.random.default_rng(0)
    row_ND = random.standard_normal((options.vectors, options.width), np.float32)
    row_ND += random.standard_normal((options.clusters, options.width), np.float32)[
        random.integers(0, options.clusters, options.vectors)
    ]
    return row_ND / np.linalg.norm(row_ND, axis=1, keepdims=True)


def ours(row_ND: NDArray[np.float32], start_CD: NDArray[np.float32]) -> NDArray[np.float32]:
    k_means = KMeans(row_ND, SingleWorld(), torch.device("cpu"))
    before = Clusters(torch.from_numpy(start_CD), np.full(len(row_ND), -1))
    return k_means.iterate(before).centre_CD.numpy()


def theirs(row_ND: NDArray[np.float32], start_CD: NDArray[np.float32]) -> NDArray[np.float32]:
    some = {"max_points_per_centroid": len(row_ND), "min_points_per_centroid": 1, "check_input_data_for_NaNs": False}
    k_means = faiss.Kmeans(row_ND.shape[1], len(start_CD), niter=1, spherical=True, **some)
    k_means.train(row_ND, init_centroids=start_CD)
    return k_means.centroids


if __name__ == "__main__":
    main()
