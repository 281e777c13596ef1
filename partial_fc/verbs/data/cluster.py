"""`partial-fc cluster`: makes classes of vectors without labels."""

import json
import time
import zlib
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import numpy as np
import tyro
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from partial_fc import terminal
from partial_fc.checkpoint.files import load_tensors, save_tensors
from partial_fc.comm import World, all_gather_json, all_or_raise
from partial_fc.data import open_on_all
from partial_fc.data.npy import map_npz, read_npy
from partial_fc.data.recordio import MAX_CLASSES, RecordSource, RecordWriter, pack
from partial_fc.data.vectors import BLOCK, Vectors, usable
from partial_fc.files import make_folders, replacing, sync_folder
from partial_fc.findings import counted
from partial_fc.flags import Flags, LaunchFlags, check_numbers
from partial_fc.flags.facts import CLASSES, In

if TYPE_CHECKING:
    from partial_fc.embedding.clusters import Clusters, KMeans

_STATE = "clusters.safetensors"


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Groups vectors into clusters by spherical k-means, and labels each vector with its nearest ones: classes to train
    on. Writes centres.npy (for --start-centres), vectors.labels.npy, and vectors.npy or train.rec. Run on all ranks of
    horovodrun, torchrun and so on, or of --gpus; the result is the same for any number of them, to the bit. After an
    interruption the same command goes on from the last iteration."""

    embeddings: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="EMBEDDINGS")]
    """The table of `partial-fc embed`, or an .npz, .npy or .parquet of vectors (docs/vectors.md). Labels in it do not
    count."""
    classes: Annotated[int, In(CLASSES)]
    """Clusters."""
    labels: Annotated[int, In("[1, 100]")] = 1
    """Nearest clusters of each vector to write, the nearest first."""
    out: Path
    """The output folder."""
    iterations: Annotated[int, In(1)] = 20
    """The most iterations; fewer if no vector moves any more."""
    start_centres: Path | None = None
    """An .npy of start centres, (classes, D). none: k-means++ on a sample of the vectors."""
    records: Path | None = None
    """The .rec (or its folder) whose images the vectors are, in order: copies it to train.rec, with the labels of each
    image in place of its own. none: copies the vectors to vectors.npy."""
    seed: int = 0
    """Of k-means++."""
    launch: Flags[LaunchFlags] = field(default_factory=LaunchFlags)

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.labels > self.classes:
            raise ValueError(f"--labels {self.labels} with --classes {self.classes}: a vector has so many nearest ones")
        if self.records and self.classes > MAX_CLASSES:
            raise ValueError(f"--classes {self.classes}: labels of a .rec are float32, exact up to {MAX_CLASSES}")


def cluster(options: ClusterOptions, world: World, device: Any) -> None:
    from partial_fc.embedding.clusters import Clusters, KMeans

    leads, path = world.rank == 0, options.out / _STATE
    source = cast(Vectors, open_on_all(lambda: Vectors(options.embeddings, labelled=False), world))
    start_CD = all_or_raise(lambda: _check(options, source, world), world, "cluster/check")
    job = _job(options, source, start_CD)
    records = all_or_raise(lambda: _prepare(options, source, job) if leads else None, world, "cluster/out")
    if leads:
        print(f"{counted(len(source), 'vector')} of {source.width} numbers; {world}", flush=True)
    k_means = KMeans(source.row_ND, world, device)
    now = _load(path, k_means, options.classes)
    if now is not None and now.iteration > options.iterations:
        raise ValueError(f"{options.out} is at iteration {now.iteration}, beyond --iterations {options.iterations}")
    if now is None:
        centre_CD = k_means.start(options.classes, options.seed) if start_CD is None else _units(start_CD, device)
        now = Clusters(centre_CD, np.full(len(source), -1))
    elif leads:
        terminal.say(f"resumes after iteration {now.iteration}")
    while now.moved and now.iteration < options.iterations:
        started = time.perf_counter()
        now = k_means.iterate(now)
        if leads:
            _save(path, now, job)
            seeded = f", {counted(now.reseeded, 'empty cluster')} reseeded" if now.reseeded else ""
            terminal.say(
                f"iteration {now.iteration} of {options.iterations}: {now.moved / len(source):.2%} moved, mean cosine "
                f"{now.cosine:.4f}{seeded}, {time.perf_counter() - started:.1f} s"
            )
    _write(options, source, records, k_means, now)
    world.barrier(name="cluster/written")
    if leads:
        print(f"{options.out}: {counted(options.classes, 'class')}, {counted(options.labels, 'label')} of each vector")


# ---- what is asked for


def _check(options: ClusterOptions, source: Vectors, world: World) -> NDArray[Any] | None:
    """Returns the start centres, if given. Raises ValueError, with file and row, for vectors that cannot be used."""
    if len(source) < options.classes:
        raise ValueError(f"{source.path}: {counted(len(source), 'vector')}, fewer than --classes {options.classes}")
    bad = source.unusable(range(world.rank * BLOCK, len(source), world.size * BLOCK))
    if len(bad):
        source.read(int(bad[0]))  # raises
    if (path := options.start_centres) is None:
        return None
    if path.suffix != ".npy" or not path.exists():
        raise ValueError(f"--start-centres {path}: not found, or no .npy")
    start_CD, shape = read_npy(path), (options.classes, source.width)
    if start_CD.shape != shape or start_CD.dtype.kind != "f":
        raise ValueError(f"--start-centres {path}: {start_CD.dtype} {start_CD.shape}; expected floating {shape}")
    bad = np.flatnonzero(~usable(start_CD.astype(np.float32)))
    if len(bad):
        raise ValueError(f"--start-centres {path}, row {bad[0]}: NaN or Inf, or only zeros")
    return start_CD


def _job(options: ClusterOptions, source: Vectors, start_CD: NDArray[Any] | None) -> dict[str, Any]:
    """What a folder's iterations depend on."""
    some = source.row_ND[:: -(-len(source) // 1024)]
    return {
        "vectors": list(source.row_ND.shape),
        "checksum of some vectors": zlib.crc32(some.tobytes()),
        "--classes": options.classes,
        "--seed": options.seed,
        "checksum of --start-centres": None if start_CD is None else zlib.crc32(start_CD.tobytes()),
    }


def _prepare(options: ClusterOptions, source: Vectors, job: dict[str, Any]) -> RecordSource | None:
    """Makes the output folder and opens the records. Raises ValueError if either belongs to other vectors."""
    path = options.out / _STATE
    if path.exists():
        found, _ = _read(path)
        if other := [f"{name}: {found[name]} there, {job[name]} here" for name in job if found[name] != job[name]]:
            raise ValueError(f"{path} is of another job ({'; '.join(other)}); give another --out")
    elif options.out.exists() and not (
        options.out.is_dir() and all(path.suffix == ".partial" for path in options.out.iterdir())
    ):
        raise ValueError(f"--out {options.out} holds something else; expected a new folder, or one of this command")
    make_folders(options.out)
    if options.records is None:
        return None
    records = RecordSource(options.records)
    if records.reader.rec_path.resolve() == (options.out / "train.rec").resolve():
        raise ValueError(f"--records {options.records} would be overwritten: give another --out")
    if len(records) != len(source):
        raise ValueError(f"{source.path} has {len(source)} vectors, {records.reader.rec_path} {len(records)} images")
    keys = map_npz(source.path).get("keys") if source.path.suffix == ".npz" else None
    for index, key in enumerate([] if keys is None else keys.tolist()):
        if key != records.key(index):
            raise ValueError(f"{source.where(index)}: its key is not that of image {index}, {records.where(index)}")
    return records


# ---- the state after an iteration


def _save(path: Path, now: "Clusters", job: dict[str, Any]) -> None:
    import torch

    facts = {"job": job, "iteration": now.iteration, "moved": now.moved, "cosine": now.cosine}
    text = torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8)
    save_tensors({"centres": now.centre_CD, "labels": torch.from_numpy(now.label_N), "facts": text}, path)
    sync_folder(path.parent)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (the job, the tensors and facts)."""
    tensors = load_tensors(path)
    facts = json.loads(bytes(tensors["facts"].tolist()))
    return facts["job"], {**facts, **tensors}


def _load(path: Path, k_means: "KMeans", num_classes: int) -> "Clusters | None":
    """Returns the clusters of rank 0's file on all ranks, which may be other hosts; None: there is none."""
    import torch

    from partial_fc.embedding.clusters import Clusters

    world = k_means.world
    _, stored = _read(path) if world.rank == 0 and path.exists() else ({}, {})
    facts = {name: stored[name] for name in ("iteration", "moved", "cosine") if stored}
    if not (facts := all_gather_json(facts, world, "cluster/stored")[0]):
        return None
    count, width = k_means.row_ND.shape
    centre_CD = world.broadcast(stored.get("centres", torch.empty(num_classes, width)), name="cluster/centres_stored")
    label_N = stored.get("labels", torch.empty(count, dtype=torch.int64))
    label_N = world.broadcast(label_N, name="cluster/labels_stored").numpy()
    return Clusters(centre_CD.to(k_means.device), label_N, **facts)


def _units(start_CD: NDArray[Any], device: Any) -> Any:
    import torch

    length_C1 = np.linalg.norm(start_CD.astype(np.float64), axis=1, keepdims=True)
    return torch.from_numpy((start_CD / length_C1).astype(np.float32)).to(device)


# ---- the result


def _write(
    options: ClusterOptions, source: Vectors, records: RecordSource | None, k_means: "KMeans", now: "Clusters"
) -> None:
    """Labels all rows by the centres as they are, and writes on rank 0. A collective."""
    found = k_means.nearest(now.centre_CD, options.labels, desc="labels")
    if k_means.world.rank != 0:
        for _ in found:
            pass
        return
    shape = (len(source),) if options.labels == 1 else (len(source), options.labels)
    with ExitStack() as files:

        def new(name: str, dtype: type, shape: tuple[int, ...]) -> NDArray[Any]:
            return open_memmap(files.enter_context(replacing(options.out / name, durable=True)), "w+", dtype, shape)

        label_NK = new("vectors.labels.npy", np.int64, shape)
        new("centres.npy", np.float32, tuple(now.centre_CD.shape))[:] = now.centre_CD.cpu().numpy()
        if records is None:
            row_ND = new("vectors.npy", np.float32, source.row_ND.shape)
        else:
            writer = files.enter_context(RecordWriter(options.out / "train.rec"))
        for some, class_BK, _ in found:
            label_NK[some] = class_BK.reshape(-1, *shape[1:])
            if records is None:
                row_ND[some] = k_means.unit_rows(some).numpy()
                continue
            for index, label_K in enumerate(class_BK.astype(np.float32), some.start):
                key = int(records.key(index))
                writer.write(key, pack(label_K, records.reader.read_sample(key)[1], id=key))
        if records is not None:
            (options.out / "property").write_text("{},{},{}\n".format(options.classes, *(records.image_size or (0, 0))))
