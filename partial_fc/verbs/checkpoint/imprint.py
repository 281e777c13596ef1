"""Imprinting: starts new classes at the mean direction of their images' embeddings, by the checkpoint's own network
(Qi, Brown and Lowe, "Low-Shot Learning with Imprinted Weights", https://arxiv.org/abs/1712.07136).

N images, D feature width.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from partial_fc import terminal
from partial_fc.checkpoint.read import Checkpoint
from partial_fc.data import Source
from partial_fc.data.npy import read_npy
from partial_fc.data.sample import naming, still
from partial_fc.embedding.load import from_checkpoint


def directions(stored: Checkpoint, source: Source, labels: Iterable[int], trust_code: bool) -> dict[int, Tensor]:
    """Returns label -> mean direction (D,), float32, length 1, of its images' embeddings, without empty classes. Raises
    ValueError for a damaged image."""
    wanted, label_N = set(labels), source.labels()
    index_N = list(range(len(source)))
    if label_N is not None:
        index_N = np.flatnonzero(np.isin(label_N, list(wanted))).tolist()
    if not index_N:
        return {}
    model, found = from_checkpoint(stored, trust_code=trust_code).model(), []

    def images() -> Iterator[np.ndarray]:
        for index in terminal.bar(index_N, desc="embed", unit="image", leave=False):
            sample = source.read(index)
            if sample.label in wanted:
                with naming(source, index):
                    image = model.prepare(still(sample))
                found.append(sample.label)
                yield image

    total: dict[int, Tensor] = {}
    for row_D, label in zip(torch.from_numpy(model.embed(images())).double(), found, strict=True):
        total[label] = total.get(label, torch.zeros(())) + row_D
    return {label: normalize(sum_D, dim=0).float() for label, sum_D in total.items()}


def from_file(path: Path, width: int) -> Tensor:
    """Returns the mean direction of a .npy file's embeddings, float (D,) or (N, D). Raises ValueError for others."""
    try:
        feat_ND = np.atleast_2d(read_npy(path))
    except OSError as error:
        raise ValueError(f"{path}: no .npy file of numbers: {error.strerror}") from error
    if feat_ND.ndim != 2 or feat_ND.shape[1] != width or not len(feat_ND) or feat_ND.dtype.kind != "f":
        raise ValueError(f"{path} holds {feat_ND.dtype} {feat_ND.shape}; expected floating (N, {width})")
    feat_D = normalize(torch.from_numpy(feat_ND.astype(np.float64))).sum(dim=0)
    if not bool(torch.isfinite(feat_D).all()) or not feat_D.norm() > 0:
        raise ValueError(f"{path}: the embeddings have no mean direction: NaN, Inf, or a sum of 0")
    return normalize(feat_D, dim=0).float()
