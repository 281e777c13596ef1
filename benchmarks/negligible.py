"""How many of a trained model's classes a second pass of the head could leave out (docs/log.md says why it leaves out
none).

    python -m benchmarks.negligible runs/demo demo/glyphs --batch-size 128

For a batch of training images: the smallest share of the classes that has to stay so that of every row's probability at
most 2^-k is lost, which bounds the error of the features' gradient, a sum of unit centres that is weighted by it.
Both products of the gradients are paid for what stays, so a step takes 1 + 2 * share forward passes at the least.
Images are as they lie in the file, without augmentation: harder ones need more classes.

B rows of the batch, C classes, D feature width.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from torch import Tensor
from torch.nn.functional import normalize

from partial_fc.checkpoint.read import Checkpoint, open_with_centres
from partial_fc.checkpoint.rows_now import rows_now
from partial_fc.data.sample import still
from partial_fc.embedding.load import from_checkpoint
from partial_fc.embedding.sources import open_images
from partial_fc.head.margin import CombinedMargin, value_and_slope
from partial_fc.verbs.model.classify import stored_centres


@dataclass(frozen=True)
class Options:
    """Shows which share of the classes a batch's gradients are made of."""

    run: tyro.conf.Positional[Path]
    """A run's folder, or a checkpoint."""
    rec: tyro.conf.Positional[Path]
    """Its training images."""
    batch_size: int = 128
    """Rows of the batch."""
    seed: int = 0
    """Which images."""


def main() -> None:
    options = tyro.cli(Options)
    stored = open_with_centres(options.run)
    unit_CD = _unit_centres(stored)
    model, source = from_checkpoint(stored, flip=False).model(), open_images([options.rec])
    chosen = np.random.default_rng(options.seed).permutation(len(source))[: options.batch_size].tolist()
    samples = [source.read(index) for index in chosen]
    unit_BD = torch.from_numpy(model.embed([still(sample) for sample in samples]))
    margin = CombinedMargin(stored.manifest["configuration"]["scale"], *stored.manifest["configuration"]["margins"])
    p_BC = negatives(unit_BD, unit_CD, torch.tensor([sample.label for sample in samples]), margin)
    print(f"{margin}; {len(unit_CD):,} classes, {len(unit_BD)} rows")
    print(f"the negatives' part of a row's probability, mean: {p_BC.sum(1).mean():.2f}\n")
    print("| lost of a row's probability | classes that stay | a step, in forward passes |\n| --- | --- | --- |")
    for k in (6, 9, 12, 16, 24):
        share = needed(p_BC, 2.0**-k)
        print(f"| 2^-{k} | {share:.1%} | {1 + 2 * share:.2f} |")


def negatives(unit_BD: Tensor, unit_CD: Tensor, label_B: Tensor, margin: CombinedMargin) -> Tensor:
    """Probabilities, float64 (B, C); 0 at each row's own class."""
    row_B = torch.arange(len(label_B))
    cos_BC = (unit_BD @ unit_CD.T).double()
    logit_BC = margin.scale * cos_BC
    logit_BC[row_B, label_B], _ = value_and_slope(margin, cos_BC[row_B, label_B], torch.ones(len(row_B)), {})
    p_BC = logit_BC.softmax(dim=1)
    p_BC[row_B, label_B] = 0.0
    return p_BC


def needed(p_BC: Tensor, budget: float) -> float:
    """The share of the classes that stays where those of the smallest probabilities are left out, one by one."""
    order_C = p_BC.amax(dim=0).argsort()
    lost_C = p_BC[:, order_C].cumsum(dim=1).amax(dim=0)
    return 1.0 - (lost_C <= budget).double().mean().item()


def _unit_centres(stored: Checkpoint) -> Tensor:
    parts = list(stored_centres(rows_now(stored)))
    class_C = torch.cat([class_N for _, class_N in parts])
    return normalize(torch.cat([centres.float() for centres, _ in parts]))[class_C.argsort()]


if __name__ == "__main__":
    main()
