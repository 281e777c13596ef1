"""A checkpoint as it lies on disk: in one folder, or spread over the folders of several hosts."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from partial_fc.checkpoint.folders import step_folder
from partial_fc.checkpoint.head_state import has_head
from partial_fc.checkpoint.read import Checkpoint
from partial_fc.checkpoint.rows import PartFile, StoredRows, part_files


class CheckpointOnDisk:
    """A complete checkpoint. Every file is compared with its checksum before it is used, so that no tool makes a new,
    valid checksum for a damaged one."""

    def __init__(self, folders: Sequence[Path]):
        """folders: those of the checkpoint, or roots whose newest counts; several where each host has one of its own.
        Raises ValueError where they are not of one checkpoint."""
        self.parts = [Checkpoint(step_folder(folder)) for folder in folders]
        first = self.parts[0]
        for other in self.parts[1:]:
            for fact in ("step", "world_size", "num_classes", "head", "position"):
                one, two = first.manifest.get(fact), other.manifest.get(fact)
                if one != two:
                    raise ValueError(
                        f"{first.folder} and {other.folder} are not of one checkpoint: {fact} {one} and {two}"
                    )
        self.folder, self.manifest = first.folder, first.manifest
        self.where = ", ".join(str(part.folder) for part in self.parts)
        if not has_head(self.manifest, self.where):
            raise ValueError(f"{self.where} has no head: it is not of recipe face")

    @property
    def world_size(self) -> int:
        return self.manifest["world_size"]

    @property
    def num_classes(self) -> int:
        return self.manifest["num_classes"]

    @property
    def class_names(self) -> list[str] | None:
        return self.parts[0].class_names

    def names(self) -> list[str]:
        """The names of all classes: their numbers, where they have no others."""
        return self.class_names or [str(number) for number in range(self.num_classes)]

    def path(self, name: str) -> Path | None:
        """The path of a file, once it is known to be whole; None: nowhere. Raises ValueError for a damaged one, and for
        one that is listed and missing everywhere."""
        listed = None
        for part in self.parts:
            path = part.folder / name
            if path.exists():
                part.checksums.check(path)
                return path
            listed = listed or (path if part.checksums[name] else None)
        if listed is not None:
            raise ValueError(f"{listed} is missing, and no other folder that was given has it")
        return None

    def load(self, name: str) -> dict[str, Tensor]:
        path = self.path(name)
        if path is None:
            raise ValueError(f"{self.where} has no {name}")
        return load_file(path)

    @cached_property
    def rows(self) -> StoredRows:
        """All rows of the head, from checked files."""
        by_name: dict[str, PartFile] = {}
        for part in self.parts:
            by_name |= {file.path.name: file for file in part_files(part.folder, self.world_size)} | by_name
        for name in tqdm(by_name, desc="checksums", unit="file", leave=False, disable=None):
            self.path(name)
        files = sorted(by_name.values(), key=lambda file: file.start)
        return StoredRows(files, 0, self.num_classes, self.num_classes, self.where, lambda path: self.path(path.name))


def describe(manifest: dict[str, Any]) -> str:
    return f"step {manifest['step']}, {manifest['num_classes']} classes, {manifest['world_size']} rank(s)"
