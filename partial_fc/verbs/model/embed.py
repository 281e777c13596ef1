"""`partial-fc embed`: a table of the embeddings of many images."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import tyro
from numpy.typing import NDArray

from partial_fc import terminal
from partial_fc.comm import World
from partial_fc.data import ImageFolder, Source, open_on_all
from partial_fc.data.sets.joined import parts_of, tables_of
from partial_fc.data.vectors import Vectors
from partial_fc.embedding.sources import has_classes, open_images
from partial_fc.findings import counted
from partial_fc.flags import Flags, LaunchFlags, check_numbers
from partial_fc.flags.facts import BATCH, PIXELS, In, Workers
from partial_fc.verbs.model.table import Layout, check_table, new_table

if TYPE_CHECKING:
    import torch

    from partial_fc.embedding.model import EmbeddingModel

_NAMED = 10  # bad images listed by name


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """A trained model."""

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A run's folder, a checkpoint, model.safetensors, or arcface_torch's model.pt, backbone.pth, checkpoint_gpu_0.pt
    """
    image_size: Annotated[int | None, In(PIXELS)] = None
    """The image size, for models whose file does not state it; none: the largest that fits the weights."""
    flip: bool | None = None
    """Add the embedding of the mirrored image; none: as the model's file states."""
    trust_code: bool = False
    """Execute the FILE.py that builds the model, if it was trained with --network FILE.py:FUNCTION."""

    def load(self, device: "torch.device | str" = "cpu") -> "EmbeddingModel":
        """Loads the model. Raises ValueError as `partial_fc.load`."""
        from partial_fc.embedding.load import load

        return load(self.model, device, image_size=self.image_size, flip=self.flip, trust_code=self.trust_code)


@dataclass(frozen=True, kw_only=True)
class EmbedOptions(ModelOptions):
    """Embeds images with a trained model: a table of keys, labels and embeddings of length 1, in the images' order. On
    all ranks of horovodrun, torchrun and so on, or of --gpus; the table is the same for any number of them (to the bit,
    with as many threads each)."""

    images: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGES...")]
    """A folder of images or of class folders, a .rec (or its folder), a list (a path, or `path label`, a line), or
    image files; or several sets, patterns and .sets files, as for training (docs/data.md). For a model of vectors: an
    .npz, .npy or .parquet (docs/vectors.md)."""
    shared_classes: bool = False
    """Classes that have the same name in several sets, or in sets without names the same number, are one class."""
    out: Path
    """The table: .npz (keys, labels, embeddings) or .parquet (key, label, embedding). A .rec's keys are its numbers."""
    on_bad: Literal["stop", "nan"] = "stop"
    """For an unusable image: stop without a table, or write NaN and report it."""
    batch_size: Annotated[int, In(BATCH)] = 64
    """Images in one forward of the network."""
    num_workers: Workers = "auto"
    """Decoding threads of each process. auto: its cores but one, from 1 to 16."""
    launch: Flags[LaunchFlags] = field(default_factory=LaunchFlags)

    def __post_init__(self) -> None:
        check_numbers(self)
        if not self.images:
            raise ValueError("IMAGES is missing: a folder, a .rec, a list, or image files")
        check_table(self.out)


def embed(options: EmbedOptions, world: World, device: Any) -> None:
    from partial_fc.comm.device import decoding_threads
    from partial_fc.embedding.on_ranks import embedded, why_bad

    model, num_threads = options.load(device), decoding_threads(options.num_workers, world)
    source = open_on_all(lambda: open_images(options.images, options.shared_classes), world)
    leads, num_bad = world.rank == 0, 0
    if leads:
        print(f"{model}; {counted(len(source), 'image')} on {world}", flush=True)
        print_left_out(source)
    facts = {"source": str(model.source), **model.facts()}
    labelled = has_classes(source)
    names = source.class_names() if labelled else None
    table_of_all = new_table(options.out, Layout(len(source), model.embedding_size, labelled, names, facts))
    with table_of_all if leads else nullcontext() as table:
        for some in embedded(model, source, world, options.batch_size, num_threads, bar="embed"):
            for index in some.bad:
                reason = why_bad(model, source, index)
                if options.on_bad == "stop":
                    raise ValueError(f"{reason} (image {index} of {len(source)}; --on-bad nan continues without it)")
                num_bad += 1
                if leads and num_bad <= _NAMED:
                    terminal.say(f"NaN: {reason}")
            if table is not None:
                keys = [source.key(some.first + i) for i in range(len(some.row_ID))]
                table.add(keys, some.label_I, some.row_ID)
    world.barrier(name="embed/written")
    if leads:
        bad = f"; NaN for {counted(num_bad, 'image')} that could not be used" if num_bad else ""
        print(f"{options.out}: {len(source):,} x {model.embedding_size}{bad}")


def print_left_out(source: Source) -> None:
    for part in parts_of(source):
        if isinstance(part, ImageFolder) and part.left_out:
            print(f"files are left out: {part.left_out_text()}", flush=True)


def embed_together(
    model: "EmbeddingModel", source: Source, world: World, batch_size: int, name: str, unit: bool = True
) -> NDArray[np.float32]:
    """Returns (N, D), bit-identical for any number of ranks. unit: scale to length 1, else keep the network's length.
    Raises ValueError, on all ranks alike, for an unusable image or one without an embedding."""
    from partial_fc.embedding.on_ranks import embedded, why_bad

    row_ND = np.empty((len(source), model.embedding_size), np.float32)
    for part in embedded(model, source, world, batch_size, unit=unit, bar=name):
        if part.bad:
            raise ValueError(f"{name}: {why_bad(model, source, part.bad[0])} (image {part.bad[0]} of {len(source)})")
        row_ND[part.first : part.first + len(part.row_ID)] = part.row_ID
    return row_ND


def embed_labelled(
    model: "EmbeddingModel | None", source: Source, world: World, batch_size: int, name: str
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Returns the embeddings (N, D) and labels (N,) of a source of `open_sets`, as embed_together. Tables of
    `partial-fc embed` need no model."""
    if tables := tables_of(source):
        row_ND = unit_rows(tables)
    elif model is None:
        raise ValueError(f"{name}: MODEL is missing, which embeds images; only tables of `partial-fc embed` need none")
    else:
        row_ND = embed_together(model, source, world, batch_size, name)
    label_N = source.labels()
    assert label_N is not None  # true for sources of open_sets
    return row_ND, label_N


def unit_rows(tables: Sequence[Vectors]) -> NDArray[np.float32]:
    """Returns the rows of tables of `partial-fc embed`, in order. Raises ValueError if one has not length 1."""
    for table in tables:
        row_ND = table.row_ND.astype(np.float32, copy=False)
        length_N = np.sqrt(np.einsum("nd,nd->n", row_ND, row_ND))
        good_N = np.abs(length_N - 1) < 1e-3
        if not good_N.all():
            bad = int(good_N.argmin())
            why = "image could not be used: embed again without it" if np.isnan(length_N[bad]) else "expected length 1"
            found = f"an embedding of length {length_N[bad]:g} ({(~good_N).sum()} such)"
            raise ValueError(f"{table.where(bad)}: {found}; {why}, as `partial-fc embed` writes")
    return np.concatenate([table.row_ND for table in tables]).astype(np.float32, copy=False)
