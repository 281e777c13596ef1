"""`partial-fc data drop`: weights that leave out the images of a training set that are far from their class.

N images, D feature width, C classes, K sub-centres of a class, I images of a part, M classes of a part.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import tyro
from numpy.typing import NDArray

from partial_fc.comm import World
from partial_fc.data import open_on_all
from partial_fc.embedding.sources import ImageFiles, open_images
from partial_fc.files import replacing
from partial_fc.findings import check_writable, counted
from partial_fc.flags import Flags, LaunchFlags, check_numbers
from partial_fc.flags.facts import BATCH, In
from partial_fc.verbs.model.embed import CentresOptions

if TYPE_CHECKING:
    from torch import Tensor

    from partial_fc.checkpoint.rows_now import RowsNow


@dataclass(frozen=True, kw_only=True)
class DropOptions(CentresOptions):
    """Writes a weight for each image of a training set, for --sample-weights: 0 if the image is more than --angle away
    from the main centre of its class, else 1. The main one of several sub-centres is that to which most images of the
    class are nearest. Deng et al. (2020, Sub-center ArcFace) train with --sub-centres 3, drop what is more than 75
    degrees away, and train again with one centre. On all ranks of horovodrun, torchrun and so on, or of --gpus."""

    images: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SETS...")]
    """The training set, as in its --rec: a .rec (or its folder), class folders, a list, ...; or several."""
    shared_classes: bool = False
    """As in the training."""
    out: Path
    """The weights, an .npy."""
    angle: Annotated[float, In("(0, 180)")] = 75.0
    """The largest angle between an image and the main centre of its class that stays, in degrees."""
    batch_size: Annotated[int, In(BATCH)] = 64
    """Images in one forward of the network."""
    launch: Flags[LaunchFlags] = field(default_factory=LaunchFlags)

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.out.suffix != ".npy":
            raise ValueError(f"--out {self.out}: expected an .npy")
        if not self.images:
            raise ValueError("SETS is missing: the training set")
        check_writable(self.out)


def drop(options: DropOptions, world: World, device: Any) -> None:
    import torch

    from partial_fc.checkpoint.rows_now import rows_now
    from partial_fc.embedding.on_ranks import embedded, why_bad

    stored, model = options.load(device)
    rows = rows_now(stored, table=options.table)
    created_C = rows.created(rows.start, rows.stop)
    source = open_on_all(lambda: open_images(options.images, options.shared_classes), world)
    if isinstance(source, ImageFiles):
        raise ValueError(f"{options.images[0]}: images without classes; expected a training set")
    leads, bad = world.rank == 0, []
    cosine_NK, label_N = np.empty((0, 0), np.float32), np.empty(len(source), np.int64)
    for part in embedded(model, source, world, options.batch_size, bar="drop"):
        # On all ranks, so that an error ends all of them.
        of_part = slice(part.first, part.first + len(part.label_I))
        label_N[of_part] = part.label_I
        cosine_IK = own_cosines(part.row_ID, part.label_I, rows, created_C)
        if not part.first:
            cosine_NK = np.empty((len(source), cosine_IK.shape[1]), np.float32)
        cosine_NK[of_part] = cosine_IK
        bad += part.bad
    if not leads:
        return
    main_N = main_cosines(cosine_NK, label_N)
    is_far_N = main_N < np.cos(np.deg2rad(options.angle))
    weight_N = np.where(is_far_N | np.isnan(main_N), 0, 1).astype(np.float32)
    with replacing(options.out) as path, path.open("wb") as file:
        np.save(file, weight_N)
    emptied = len(np.unique(label_N[label_N >= 0])) - len(np.unique(label_N[weight_N > 0]))
    print(
        f"{options.out}: {is_far_N.sum():,} of {counted(len(source), 'image')} ({is_far_N.mean():.1%}) are more than "
        f"{options.angle:g} degrees from the main centre of their class, and weigh 0; {counted(emptied, 'class')} have "
        "none left. Train again with --sample-weights, and without --sub-centres"
    )
    unknown = int((~created_C[torch.from_numpy(label_N[label_N >= 0])]).sum())
    if unknown:
        print(f"{counted(unknown, 'image')} stay unjudged: no step of {stored.where} has touched their classes")
    if bad:
        first = why_bad(model, source, bad[0])
        print(f"{counted(len(bad), 'image')} cannot be used, and weigh 0; the first: {first}")


def own_cosines(
    row_ID: NDArray[np.float32], label_I: NDArray[np.int64], rows: "RowsNow", created_C: "Tensor"
) -> NDArray[np.float32]:
    """Returns the cosines of embeddings with the sub-centres of their own classes, (I, K): NaN for an embedding of NaN;
    1 where no step has touched the class, which then says nothing about its images. Raises ValueError for a label that
    the checkpoint does not have."""
    import torch

    usable_I = ~np.isnan(row_ID[:, 0])
    class_M, place_I = np.unique(np.where(usable_I, label_I, 0), return_inverse=True)
    if class_M[0] < 0 or class_M[-1] >= rows.stop:
        wrong = class_M[0] if class_M[0] < 0 else class_M[-1]
        raise ValueError(
            f"the set has the class {wrong}; the checkpoint has 0 to {rows.stop - 1}: give its training set"
        )
    class_of = torch.from_numpy(class_M)
    known = created_C[class_of]
    *many, _ = rows.columns["centres"].shape
    width = many[0] if many else 1
    centre_MKD = torch.zeros(len(class_M), width, row_ID.shape[1])
    if bool(known.any()):
        centre_MKD[known] = (
            rows.read(class_of[known], ("centres",))["centres"].float().reshape(-1, *centre_MKD.shape[1:])
        )
    unit_MKD = torch.nn.functional.normalize(centre_MKD, dim=2)
    cosine_IK = torch.einsum("id,ikd->ik", torch.from_numpy(row_ID), unit_MKD[place_I])
    cosine_IK[torch.from_numpy(usable_I) & ~known[place_I]] = 1.0
    return cosine_IK.numpy()


def main_cosines(cosine_NK: NDArray[np.float32], label_N: NDArray[np.int64]) -> NDArray[np.float32]:
    """Returns the cosine of each image with the main sub-centre of its class, the one to which most of the class's
    images are nearest: (N,)."""
    usable_N = ~np.isnan(cosine_NK[:, 0])
    count_CK = np.zeros((label_N.max(initial=0) + 1, cosine_NK.shape[1]), np.int64)
    np.add.at(count_CK, (label_N[usable_N], cosine_NK[usable_N].argmax(axis=1)), 1)
    return np.take_along_axis(cosine_NK, count_CK.argmax(axis=1)[label_N][:, None], axis=1)[:, 0]
