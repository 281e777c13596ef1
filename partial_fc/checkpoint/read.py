"""Reads checkpoints, by whatever number of ranks they were written, in one folder or in those of several hosts."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from partial_fc.checkpoint import head_state
from partial_fc.checkpoint.checksums import read_checksums
from partial_fc.checkpoint.files import sha256
from partial_fc.checkpoint.folders import MANIFEST, MARKER, step_folder
from partial_fc.checkpoint.head_state import Head, has_head
from partial_fc.checkpoint.rows import StoredRows, part_files
from partial_fc.checkpoint.snapshot import FORMAT, below, local_name
from partial_fc.comm import World
from partial_fc.head import PartialFC
from partial_fc.optim.compression import merge_residuals

_READABLE = (3, FORMAT)  # 3: without checksums and running statistics of the ranks
_SAME = ("step", "world_size", "num_classes", "head", "position")  # in the folders of all hosts


class Checkpoint:
    """One complete checkpoint, of which every file is compared with its checksum before anything of it is used."""

    def __init__(self, folder: Path, *others: Path):
        """others: the folders that other hosts have of it, where they do not share one. Raises ValueError for folders
        that are not complete or not of one checkpoint."""
        self.folder, self.folders = folder, (folder, *others)
        self.where = ", ".join(map(str, self.folders))
        self.manifest = _manifest(folder)
        self.step: int = self.manifest["step"]
        self.world_size: int = self.manifest["world_size"]
        self.checksums: dict[Path, str] = {}  # as the lists in the folders have them, SHA-256 in hex
        self._checked: set[Path] = set()
        for each in self.folders:
            manifest = _manifest(each)
            for fact in _SAME:
                one, two = self.manifest.get(fact), manifest.get(fact)
                if one != two:
                    raise ValueError(f"{folder} and {each} are not of one checkpoint: {fact} {one} and {two}")
            for path in sorted(each.glob(f"rank-*-of-{self.world_size:05d}.sha256")):
                self.checksums |= {each / name: digest for name, digest in read_checksums(path).items()}
            self.check(each / MANIFEST)

    # ---- files

    def check(self, path: Path) -> None:
        """Raises ValueError where the file is not there, or not what was written."""
        if not path.exists():
            raise ValueError(
                f"{path} is missing. Where each host has a folder of its own for checkpoints, copy the files of all of "
                "them into this folder"
            )
        if self.checksums and path not in self._checked:  # the format before had no checksums
            expected = self.checksums.get(path)
            if expected is None:
                raise ValueError(f"{path} is in no list of checksums beside it (rank-*.sha256): not of this checkpoint")
            actual = sha256(path)
            if actual != expected:
                raise ValueError(
                    f"{path} is damaged: its SHA-256 is {actual[:16]}..., expected {expected[:16]}... Go on from an "
                    "older checkpoint (--resume DIR; `partial-fc checkpoint verify` tells which are whole), or bring "
                    "this file back from a copy"
                )
        self._checked.add(path)

    def path(self, name: str) -> Path | None:
        """The path of a file, checked; None: the checkpoint has none of that name. Raises ValueError for a damaged one,
        and for one that is listed and missing."""
        paths = [folder / name for folder in self.folders]
        path = next((path for path in paths if path.exists()), None)
        path = path or next((path for path in paths if path in self.checksums), None)
        if path is not None:
            self.check(path)
        return path

    def load(self, name: str, optional: bool = False) -> dict[str, Tensor]:
        """All tensors of a file, mapped from it. optional: none where the checkpoint has no such file. Raises
        ValueError as `path` does, and for what is no safetensors file."""
        path = self.path(name)
        if path is None:
            if optional:
                return {}
            raise ValueError(f"{self.where} has no {name}")
        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is no safetensors file, or cut short: {error}") from error

    # ---- what is in them

    @property
    def class_names(self) -> list[str] | None:
        """The names of all classes, by number; None: they have none but their numbers."""
        path = self.path("class-names.txt")
        if path is None:
            return None
        try:
            return path.read_bytes().decode("utf-8").split("\n")[:-1]  # read_text would also split at a name's \r
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is damaged: {error}") from None

    def names(self) -> list[str]:
        """The names of all classes: their numbers, where they have no others."""
        return self.class_names or [str(number) for number in range(self.manifest["num_classes"])]

    def backbone(self) -> dict[str, Tensor]:
        return self.load("backbone.safetensors")

    def optimizer(self) -> dict[str, Tensor]:
        return self.load("optimizer.safetensors")

    def local(self, rank: int) -> dict[str, Tensor]:
        """What only this rank had (`Snapshot.local`)."""
        if self.manifest["format"] == 3:
            residuals = self.load(f"exchange-{rank:05d}-of-{self.world_size:05d}.safetensors", optional=True)
            return {f"exchange/{name}": t for name, t in residuals.items()}
        return self.load(local_name(rank, self.world_size), optional=True)

    def exchange(self, world: World) -> dict[str, Tensor]:
        """What this rank's gradient compression remembers. On another number of ranks each takes an equal part of all
        residuals. Empty: the run had none."""
        if self.world_size == world.size:
            return below("exchange/", self.local(world.rank))
        return self.merged_exchange(world.size)

    def merged_exchange(self, num_ranks: int) -> dict[str, Tensor]:
        """What gradient compression remembers on each of another number of ranks."""
        states = [below("exchange/", self.local(rank)) for rank in range(self.world_size)]
        return merge_residuals(states, num_ranks) if all(states) else {}

    def buffers(self, world: World) -> dict[str, Tensor]:
        """The running statistics that this rank had; those of all ranks together are in the backbone, and are what
        another number of ranks goes on with (empty here)."""
        return below("buffer/", self.local(world.rank)) if self.world_size == world.size else {}

    def rows(self, start: int = 0, stop: int | None = None) -> StoredRows:
        """The rows of classes [start, stop), from as many files as they lie in; stop None: to the last. Raises
        ValueError where a class is in no file."""
        end = self.manifest["num_classes"]
        files = part_files(self.folders, self.world_size)
        return StoredRows(files, start, end if stop is None else stop, end, self.where, self.check)

    def load_head(self, head: Head) -> list[str]:
        """Gives the head the rows of its class range, of which one file's at a time are in memory. Returns what the
        user should know: what could not be taken over. A head without rows gets nothing."""
        if head.rows is None:
            return []
        assert isinstance(head, PartialFC)
        head_state.check_same_head(self.manifest, head, self.where)
        notes = head_state.load(self.manifest, self.rows(head.rows.start, head.rows.stop), head, self.where)

        def lists() -> dict[str, Tensor]:
            return self.load(head_state.hard_negatives_name(head.world.rank, self.world_size))

        return notes + head_state.load_hard_negatives(self.manifest, lists, head, self.where)


def open_with_centres(*folders: Path) -> Checkpoint:
    """folders: those of a checkpoint, or roots whose newest counts. Raises ValueError also where it has no centres."""
    checkpoint = Checkpoint(*map(step_folder, folders))
    if not has_head(checkpoint.manifest, checkpoint.where):
        raise ValueError(f"{checkpoint.where} has no class centres: it is not of recipe face")
    return checkpoint


def _manifest(folder: Path) -> dict[str, Any]:
    """What the manifest says. Raises ValueError where the folder is not complete, or this version cannot read it."""
    if not (folder / MARKER).exists():
        raise ValueError(f"{folder} is no complete checkpoint: it has no file {MARKER}")
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        form, facts = manifest["format"], (manifest["step"], manifest["world_size"])
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: go on from another checkpoint (--resume DIR)") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error!r}; go on from another checkpoint (--resume DIR)") from error
    if form not in _READABLE:
        raise ValueError(f"{folder} has format {form!r}; this version reads {' and '.join(map(str, _READABLE))}")
    if not all(type(fact) is int and fact >= 0 for fact in facts):
        raise ValueError(f"{path} is damaged: step and world_size are {facts}, expected whole numbers")
    return manifest
