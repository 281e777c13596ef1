"""A checkpoint as it lies on disk: in one folder, or spread over the folders of several hosts."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from partial_fc.checkpoint.folders import MARKER, newest
from partial_fc.checkpoint.read import Checkpoint
from partial_fc.checkpoint.tools.stored_rows import PartFile, StoredRows

MANIFEST = "manifest.json"


def is_step(folder: Path) -> bool:
    """Whether it is the folder of one checkpoint, whole or not, and no folder of such."""
    return (folder / MANIFEST).exists() or (folder / MARKER).exists()


def step_folder(folder: Path) -> Path:
    """The folder itself, or the newest complete checkpoint in it. Raises ValueError where there is none."""
    if is_step(folder):
        return folder
    for root in (folder, folder / "checkpoints"):
        found = newest(root)
        if found is not None:
            return found
    raise ValueError(
        f"{folder} holds no complete checkpoint; expected a folder step-N with a file {MARKER}, or one of such"
    )


def steps_below(folder: Path) -> list[Path]:
    """The folders of checkpoints, whole or not, in a folder of such; by name."""
    for root in (folder, folder / "checkpoints"):
        found = sorted(path for path in root.glob("step-*") if path.is_dir())
        if found:
            return found
    raise ValueError(f"{folder} holds no checkpoint; expected a folder step-N, or one with such folders")


class Stored:
    """A complete checkpoint. Every file is compared with its checksum before it is used, so that no tool makes a new,
    valid checksum for a damaged one."""

    def __init__(self, folders: Sequence[Path]):
        """folders: of the checkpoint, or roots whose newest counts; several where each host has one of its own. Raises
        ValueError where they are not of one checkpoint."""
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
        """Of all classes: their numbers, where they have no others."""
        return self.class_names or [str(number) for number in range(self.num_classes)]

    def path(self, name: str) -> Path | None:
        """Where a file lies, once it is known to be whole; None: nowhere. Raises ValueError for a damaged one, and for
        one that is listed and missing everywhere."""
        listed = None
        for part in self.parts:
            path = part.folder / name
            if path.exists():
                part.sums.check(path)
                return path
            listed = listed or (path if part.sums[name] else None)
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
        files: dict[str, PartFile] = {}
        for part in self.parts:
            for file in part_files(part.folder, self.world_size):
                files.setdefault(file.path.name, file)
        for name in tqdm(files, desc="checksums", unit="file", leave=False, disable=None):
            self.path(name)
        return StoredRows(files.values(), self.num_classes, self.where)


def part_files(folder: Path, world_size: int) -> list[PartFile]:
    found = (PartFile.of(path) for path in sorted(folder.glob(f"head-*-of-{world_size:05d}-classes-*")))
    return [file for file in found if file is not None]


def has_head(manifest: dict[str, Any], where: str) -> bool:
    """Whether it is of a run with class centres. Raises ValueError where what it says of them cannot be."""
    if "num_classes" not in manifest:
        return False
    head = manifest.get("head")
    facts = {name: manifest.get(name) for name in ("world_size", "num_classes", "embedding_size", "sub_centres")}
    counts = {**facts, "head.num_steps": head.get("num_steps") if isinstance(head, dict) else None}
    for name, value in counts.items():
        least = int(name in facts)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 62:
            raise ValueError(f"{where}: {MANIFEST} says {name} is {value!r}; expected a whole number from {least}")
    inner: tuple[tuple[str, Any], ...] = (("row_seed", 0), ("margin", {}), ("schedule", {}))
    for name, empty in inner:
        value = head.get(name) if isinstance(head, dict) else None
        if not isinstance(value, type(empty)):
            raise ValueError(f"{where}: {MANIFEST} says head.{name} is {value!r}; expected {type(empty).__name__}")
    outer: tuple[tuple[str, Any], ...] = (
        ("configuration", {}),
        ("history", []),
        ("best", {}),
        ("versions", {}),
    )
    for name, empty in outer:
        value = manifest.get(name, empty)
        if not isinstance(value, type(empty)):
            raise ValueError(f"{where}: {MANIFEST} says {name} is {value!r}; expected {type(empty).__name__}")
    return True


def describe(manifest: dict[str, Any]) -> str:
    return f"step {manifest['step']}, {manifest['num_classes']} classes, {manifest['world_size']} rank(s)"
