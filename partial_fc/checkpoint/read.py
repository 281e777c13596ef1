"""Reads checkpoints, by whatever number of ranks they were written."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from partial_fc.checkpoint import head_state
from partial_fc.checkpoint.checksums import Checksums
from partial_fc.checkpoint.folders import MANIFEST, MARKER
from partial_fc.checkpoint.head_state import Head
from partial_fc.checkpoint.rows import StoredRows, part_files
from partial_fc.checkpoint.snapshot import FORMAT, local_name
from partial_fc.comm import World
from partial_fc.head import PartialFC
from partial_fc.optim.exchange import joined

_READABLE = (3, FORMAT)  # 3: without checksums and running statistics of the ranks


class Checkpoint:
    """One complete checkpoint folder. Raises ValueError for one that is not. What is read from it is compared with its
    checksums first."""

    def __init__(self, folder: Path):
        self.folder = folder
        if not (folder / MARKER).exists():
            raise ValueError(f"{folder} is no complete checkpoint: it has no file {MARKER}")
        self.manifest = _manifest(folder)
        self.checksums = Checksums(folder, self.manifest["world_size"])
        self.checksums.check(folder / MANIFEST)

    @property
    def step(self) -> int:
        return self.manifest["step"]

    @property
    def class_names(self) -> list[str] | None:
        """The names of all classes, by number; None: they have none but their numbers."""
        path = self.folder / "class-names.txt"
        if not path.exists():
            return None
        self.checksums.check(path)
        try:
            return path.read_bytes().decode("utf-8").split("\n")[:-1]  # read_text would also split at a name's \r
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is damaged: {error}") from None

    def backbone(self) -> dict[str, Tensor]:
        return self.checksums.load(self.folder / "backbone.safetensors")

    def optimizer(self) -> dict[str, Tensor]:
        return self.checksums.load(self.folder / "optimizer.safetensors")

    def exchange(self, world: World) -> dict[str, Tensor]:
        """What this rank's gradient compression remembers. On another number of ranks each takes an equal part of what
        all of them owed. Empty: the run had none."""
        if self.manifest["world_size"] == world.size:
            return _below("exchange/", self._local(world.rank))
        owed = [_below("exchange/", self._local(rank)) for rank in range(self.manifest["world_size"])]
        return joined(owed, world.size) if all(owed) else {}

    def buffers(self, world: World) -> dict[str, Tensor]:
        """The running statistics that this rank had; those of all ranks together are in the backbone, and are what
        another number of ranks goes on with (empty here)."""
        if self.manifest["world_size"] != world.size:
            return {}
        return _below("buffer/", self._local(world.rank))

    def rows(self, start: int, stop: int) -> StoredRows:
        """The rows of classes [start, stop), from as many files as they lie in. Raises ValueError where one is in
        none."""
        files = part_files(self.folder, self.manifest["world_size"])
        where = str(self.folder)
        return StoredRows(files, start, stop, self.manifest["num_classes"], where, self.checksums.check)

    def load_head(self, head: Head) -> list[str]:
        """Gives the head the rows of its class range, of which one file's at a time are in memory. Returns what the
        user should know: what could not be taken over. A head without rows gets nothing."""
        if head.rows is None:
            return []
        where, size = str(self.folder), self.manifest["world_size"]
        assert isinstance(head, PartialFC)
        head_state.check_same_head(self.manifest, head, where)
        notes = head_state.load(self.manifest, self.rows(head.rows.start, head.rows.stop), head, where)

        def lists() -> dict[str, Tensor]:
            return self.checksums.load(self.folder / head_state.hard_negatives_name(head.world.rank, size))

        return notes + head_state.load_hard_negatives(self.manifest, lists, head, where)

    def _local(self, rank: int) -> dict[str, Tensor]:
        size = self.manifest["world_size"]
        if self.manifest["format"] == 3:
            path = self.folder / f"exchange-{rank:05d}-of-{size:05d}.safetensors"
            return {f"exchange/{name}": t for name, t in self.checksums.load(path).items()} if path.exists() else {}
        path = self.folder / local_name(rank, size)
        return self.checksums.load(path) if path.exists() or self.checksums[path.name] else {}


def _manifest(folder: Path) -> dict[str, Any]:
    """What the manifest says. Raises ValueError for one that this version cannot read."""
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
    if not all(isinstance(fact, int) and not isinstance(fact, bool) and fact >= 0 for fact in facts):
        raise ValueError(f"{path} is damaged: step and world_size are {facts}, expected whole numbers")
    return manifest


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
