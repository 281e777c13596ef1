"""`partial-fc classify`: the nearest class centres of an image.

N images, M classes of a part of the centres, K nearest ones, D feature width.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import tyro
from numpy.typing import NDArray

from partial_fc import terminal
from partial_fc.comm import SingleWorld
from partial_fc.embedding.sources import open_images
from partial_fc.flags import check_numbers
from partial_fc.flags.facts import In

if TYPE_CHECKING:
    from torch import Tensor

    from partial_fc.checkpoint.read import Checkpoint
    from partial_fc.checkpoint.rows_now import RowsNow

_CLASSES_AT_ONCE = 65536
_COSINES_AT_ONCE = 1 << 24  # of all images: fewer classes at once where there are many


@dataclass(frozen=True, kw_only=True)
class ClassifyOptions:
    """Prints, for each image, the classes whose centres are nearest to its embedding, with names and cosines: what the
    training would take it for. A class that no step has touched has no place yet, and is not asked."""

    checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    """A run's folder, whose newest checkpoint counts, or a checkpoint's. (model.safetensors has no class centres.)"""
    table: str = ""
    """The head whose classes are asked, of a run with several."""
    flip: bool | None = None
    """Add the embedding of the mirrored image; none: as the checkpoint says."""
    trust_code: bool = False
    """Execute the FILE.py that builds the model, if it was trained with --network FILE.py:FUNCTION."""
    images: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGES...")]
    """Image files; or a folder, a list or a .rec."""
    top: Annotated[int, In(1)] = 5
    """Classes for each image."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU where there is one."""

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"--device is {self.device!r}; expected auto, cpu or cuda")


def classify(options: ClassifyOptions) -> int:
    """Prints the results; returns the exit status: 1 if an image is unusable."""
    from partial_fc.checkpoint.head_state import tables_in
    from partial_fc.checkpoint.read import open_with_centres
    from partial_fc.comm.device import device_type
    from partial_fc.embedding.load import from_checkpoint
    from partial_fc.embedding.on_ranks import embedded, why_bad

    if not options.images:
        raise ValueError("IMAGES is missing: image files, a folder, a list or a .rec")
    if options.checkpoint.is_file():
        raise ValueError(
            f"{options.checkpoint} is a file, without class centres: give the checkpoint, step-N, or the run's folder"
        )
    stored = open_with_centres(options.checkpoint, table=options.table)
    model = from_checkpoint(stored, options.flip, options.trust_code).model().to(device_type(options.device))
    num_classes = tables_in(stored.manifest, stored.where)[options.table]["num_classes"]
    source = open_images(options.images)
    print(f"{model}; {num_classes:,} classes")
    parts = list(embedded(model, source, SingleWorld()))
    cosine_NK, class_NK = nearest(np.concatenate([part.row_ID for part in parts]), stored, options.top, options.table)
    names = stored.class_names_of(options.table)
    bad = {index for part in parts for index in part.bad}
    for index in range(len(source)):
        if index in bad:
            print(f"{why_bad(model, source, index)}")
            continue
        print(source.key(index))
        for cosine, number in zip(cosine_NK[index].tolist(), class_NK[index].tolist(), strict=True):
            if cosine > -1.5:
                print(f"  {cosine:7.4f}  {f'{names[number]} (class {number})' if names else f'class {number}'}")
    return 1 if bad else 0


def nearest(row_ND: NDArray[np.float32], stored: "Checkpoint", top: int, table: str = "") -> "tuple[Tensor, Tensor]":
    """Returns (cosines, class numbers) of the `top` nearest classes of each embedding, (N, K), descending. The nearest
    of a class's sub-centres counts. Keeps one file's centres in memory at a time, and 64 MiB of cosines. Raises
    ValueError without centres."""
    import torch

    from partial_fc.checkpoint.rows_now import rows_now
    from partial_fc.head.kernels.nearest import Nearest

    rows = rows_now(stored, table=table)
    row = torch.from_numpy(row_ND)
    found = Nearest(len(row), min(top, rows.stop), row.dtype)
    most = min(_CLASSES_AT_ONCE, max(1, _COSINES_AT_ONCE // max(1, len(row))))
    for centres, class_M in stored_centres(rows, most):
        centre_MRD = centres.float().reshape(len(class_M), -1, row.shape[1])  # R of a class
        length_MR1 = centre_MRD.norm(dim=2, keepdim=True)
        # A centre that was never created has no direction.
        cosine_MRN = torch.where(length_MR1 > 0, (centre_MRD / length_MR1) @ row.T, -torch.inf)
        found.add(cosine_MRN.amax(1).T, class_M)
    if not bool((found.cosine_GK > -torch.inf).any()) and not bool(row.isnan().all()):
        raise ValueError(f"{stored.where}: no step has touched any class: there are no centres to compare with")
    return found.cosine_GK, found.class_GK


def stored_centres(rows: "RowsNow", most: int = _CLASSES_AT_ONCE) -> "Iterator[tuple[Tensor, Tensor]]":
    """Yields (centres after all steps, class numbers) of the classes with centres, up to `most` at a time."""
    with terminal.bar(total=rows.stop, unit="class", desc="centres", leave=False) as bar:
        for part in rows.parts():
            centres, class_N = part.tensors["centres"], part.class_N
            for begin in range(0, len(class_N), most):
                block = slice(begin, begin + most)
                yield centres[block], class_N[block]
            bar.update(part.stop - part.start)
