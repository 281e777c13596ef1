"""The reader of checkpoints, written by any number of ranks, in one folder or in those of several hosts."""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor

from partial_fc.checkpoint import head_state
from partial_fc.checkpoint.files import checksums_name, load_tensors, read_checksums, sha256
from partial_fc.checkpoint.folders import MANIFEST, MARKER, step_folder
from partial_fc.checkpoint.head_state import FORMAT, hard_negatives_name, tables_in
from partial_fc.checkpoint.rows import StoredRows, part_files
from partial_fc.checkpoint.snapshot import buffers_in, local_name
from partial_fc.comm import World
from partial_fc.files import MANIFEST_BYTES, NO_SUCH_FILE, read_manifest, read_text
from partial_fc.head.protocol import Head
from partial_fc.head.shard import Shard

_UNNAMED = 1 << 19  # classes; more only if the files have a byte for each
_SAME = ("step", "world_size", "tables", "head", "position")  # in the folders of all hosts
_ADDED = ("score", "best", "best_score")  # to the marker (Saver.add_score)
_OLDER = "; resume from another checkpoint (--resume DIR)"


class Damaged(ValueError):
    """A file of a checkpoint is missing, or differs from what was written."""

    def __init__(self, what: str, to_do: str = ""):
        """what: the file and its fault, without the remedy."""
        super().__init__(what + to_do)
        self.what = what


class Checkpoint:
    """A complete checkpoint; every file is compared with its checksum before it is used."""

    def __init__(self, folder: Path, *others: Path):
        """others: its folders on other hosts, if they do not share one. Raises ValueError for folders that are
        incomplete or not of one checkpoint, Damaged for a damaged file that is read here."""
        self.folder, self.folders = folder, (folder, *others)
        self.where = ", ".join(map(str, self.folders))
        self.checksums: dict[Path, str] = {}  # from the lists in the folders, SHA-256 in hex
        self._marked: list[Sequence[int]] = []  # by folder, the ranks whose files are there
        self._checked: set[Path] = set()
        manifests = [self._open(each) for each in self.folders]
        self.manifest = manifests[0]
        self.step: int = self.manifest["step"]
        self.world_size: int = self.manifest["world_size"]
        for each, manifest in zip(self.folders, manifests, strict=True):
            for fact in _SAME:
                one, two = self.manifest.get(fact), manifest.get(fact)
                if one != two:
                    raise ValueError(f"{folder} and {each} are not of one checkpoint: {fact} {one} and {two}")

    def _open(self, folder: Path) -> dict[str, Any]:
        """Reads marker, lists of checksums and manifest of a folder; returns the manifest."""
        try:
            marker = read_text(folder / MARKER, MANIFEST_BYTES, errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            raise ValueError(f"{folder} is no complete checkpoint, it has no file {MARKER}: use another one") from None
        # Path.glob finds nothing in an unreadable folder.
        names = sorted(name for name in os.listdir(folder) if fnmatch(name, "rank-*.sha256"))
        lists = {name: _listed(folder / name) for name in names}
        manifest = _manifest(folder, lists.values())
        ranks = _marked_ranks(folder / MARKER, marker, manifest)
        for name in (checksums_name(rank, manifest["world_size"]) for rank in ranks):
            if name not in lists:
                raise Damaged(f"{folder / name} is missing: the files beside it cannot be checked")
        if not any(MANIFEST in listed for listed in lists.values()):
            raise Damaged(f"{folder / MANIFEST} is in no list of checksums beside it (rank-*.sha256)")
        for listed in lists.values():
            self.checksums |= {folder / name: digest for name, digest in listed.items()}
        self._marked.append(ranks)
        self._checked.add(folder / MANIFEST)
        return manifest

    @property
    def ranks(self) -> set[int]:
        """Returns the ranks whose files are in the folders."""
        return set().union(*self._marked)

    # ---- files

    def check(self, path: Path) -> None:
        """Raises Damaged if the file is missing, or differs from what was written; OSError if the disk fails."""
        if not path.exists():
            raise Damaged(
                f"{path} is missing",
                ". Where each host has a folder of its own for checkpoints, copy the files of all of them into this "
                "folder",
            )
        if path not in self._checked:
            expected = self.checksums.get(path)
            if expected is None:
                raise Damaged(f"{path} is in no list of checksums beside it (rank-*.sha256): not of this checkpoint")
            _compare(path, sha256(path), expected)
        self._checked.add(path)

    def check_share(self, rank: int, size: int) -> None:
        """Checks the files that this rank of `size` reads. Raises as `check`; ValueError if a class is in no file."""
        for path in self.checksums:
            if not path.exists():
                self.check(path)
        same_size = self.world_size == size
        tables = tables_in(self.manifest, self.where)
        own = [hard_negatives_name(table, rank, self.world_size) for table in tables]
        own.append(local_name(rank, self.world_size))
        for name in ("class-names.txt", "backbone.safetensors", "optimizer.safetensors", *(own if same_size else ())):
            self.path(name)
        self.check_rows(rank, size)

    def check_rows(self, rank: int, size: int) -> None:
        """Runs `check_share` for the head's rows alone."""
        for name, table in tables_in(self.manifest, self.where).items():
            shard = Shard.of(table["num_classes"], rank, size)
            for file in self.rows(shard.start, shard.stop, name).files:
                self.check(file.path)

    def path(self, name: str) -> Path | None:
        """Returns the checked path of a file; None if it never existed. Raises Damaged if it is damaged, or missing."""
        paths = [folder / name for folder in self.folders]
        path = next((path for path in paths if path.exists()), None)
        path = path or next((path for path in paths if path in self.checksums), None)
        if path is not None:
            self.check(path)
        return path

    def load(self, name: str, optional: bool = False) -> dict[str, Tensor]:
        """Returns all tensors of a file, memory-mapped. optional: {} if the checkpoint has no such file. Raises
        ValueError as `path` does, and for an invalid safetensors file."""
        path = self.path(name)
        if path is None:
            if optional:
                return {}
            raise ValueError(f"{self.where} has no {name}")
        return load_tensors(path)

    # ---- contents

    @property
    def class_names(self) -> list[str] | None:
        """Returns the names of all classes, by number; None if they have only numbers."""
        path = self.path("class-names.txt")
        if path is None:
            return None
        try:
            return read_text(path).split("\n")[:-1]  # Path.read_text would also split at a name's \r
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}") from None

    def class_names_of(self, table: str) -> list[str] | None:
        """Returns the names of a table's classes, by number; None if they have only numbers. The names are those of
        one table, or of all together where they have numbers one after the other (Heads)."""
        names, tables = self.class_names, tables_in(self.manifest, self.where)
        if names is None or len(names) == tables[table]["num_classes"]:
            return names
        first = self.manifest["head"].get("first_class", {}).get(table)
        return None if first is None else names[first : first + tables[table]["num_classes"]]

    def names(self) -> list[str]:
        """Returns the names of all classes, by default their numbers. For a head with one unnamed table."""
        if named := self.class_names:
            return named
        num_classes = tables_in(self.manifest, self.where)[""]["num_classes"]
        num_bytes = sum(file.path.stat().st_size for file in self.rows().files)
        if num_classes > _UNNAMED + num_bytes:
            raise ValueError(
                f"{self.where}: {num_classes:,} classes without names in {num_bytes:,} bytes of centres: too many to "
                "list, or a damaged manifest.json"
            )
        return [str(number) for number in range(num_classes)]

    def backbone(self) -> dict[str, Tensor]:
        return self.load("backbone.safetensors")

    def optimizer(self) -> dict[str, Tensor]:
        return self.load("optimizer.safetensors")

    def local(self, rank: int) -> dict[str, Tensor]:
        """Returns the state of this rank alone (`Snapshot.local`)."""
        return self.load(local_name(rank, self.world_size), optional=True)

    def buffers(self, world: World) -> dict[str, Tensor]:
        """Returns this rank's running statistics; {} on another number of ranks: the backbone's joint ones apply."""
        return buffers_in(self.local(world.rank)) if self.world_size == world.size else {}

    def rows(self, start: int = 0, stop: int | None = None, table: str = "") -> StoredRows:
        """Returns the rows of classes [start, stop); stop None: to the last. Raises ValueError if one is missing."""
        end = tables_in(self.manifest, self.where)[table]["num_classes"]
        files = part_files(self.folders, self.world_size, table)
        where = f"{self.where}, table {table}" if table else self.where
        return StoredRows(files, start, end if stop is None else stop, end, where, self.check)

    def load_head(self, head: Head) -> list[str]:
        """Loads the rows of its class range into each table, file by file. Returns notes on what was not loaded."""
        stored, notes = head_state.check_same_head(self.manifest, head, self.where), []
        for name, table in head.tables().items():
            rows = self.rows(table.rows.start, table.rows.stop, name)
            notes += head_state.load_table(stored[name], rows, table, self.where)
            lists = partial(self.load, hard_negatives_name(name, table.world.rank, self.world_size))
            notes += head_state.load_hard_negatives(stored[name], self.world_size, lists, table, self.where)
        head.load(self.manifest["head"])
        return notes

    def check_has_backbone(self) -> None:
        """Raises ValueError for a checkpoint of class centres alone: a run cannot resume from it."""
        if self.path("backbone.safetensors") is None:
            raise ValueError(
                f"{self.folder} holds class centres without a backbone: start with --start-centres {self.folder} and "
                "--pretrained instead of --resume"
            )


def open_with_centres(*folders: Path, named: bool = False, table: str | None = None) -> Checkpoint:
    """Opens a checkpoint that has class centres. folders: of it, or roots whose newest counts. named: accepts named
    tables. table: it must have this one; "": one without a name. Raises ValueError if it has no centres, or others."""
    checkpoint = Checkpoint(*map(step_folder, folders))
    tables = tables_in(checkpoint.manifest, checkpoint.where)
    if not tables:
        raise ValueError(f"{checkpoint.where} has no class centres: it is not of recipe face")
    if table is not None and table not in tables:
        has = f"the tables {', '.join(map(repr, tables))}" if "" not in tables else "one table, without a name"
        asked = f"none is named {table!r}" if table else "say which: --table NAME"
        raise ValueError(f"{checkpoint.where} has {has}; {asked}")
    if not named and table is None and list(tables) != [""]:
        raise ValueError(
            f"{checkpoint.where} has the tables {', '.join(map(repr, tables))}; expected a checkpoint of a head with "
            "one table, without a name (inspect, verify and reshard take any, classify and export one: --table)"
        )
    return checkpoint


def _listed(path: Path) -> dict[str, str]:
    """Returns the entries of a list of checksums."""
    try:
        return read_checksums(path)
    except ValueError as error:
        raise Damaged(str(error)) from None


def _compare(path: Path, actual: str, expected: str) -> None:
    if actual != expected:
        raise Damaged(
            f"{path} is damaged: its SHA-256 is {actual[:16]}..., expected {expected[:16]}...",
            " Resume from an older checkpoint (--resume DIR; `partial-fc checkpoint verify` names the intact ones), or "
            "restore this file from a copy",
        )


def _manifest(folder: Path, lists: Iterable[dict[str, str]]) -> dict[str, Any]:
    """Returns the manifest. lists: of checksums beside it. Raises Damaged, ValueError for another format."""
    path = folder / MANIFEST
    try:
        content = read_manifest(path)
    except FileNotFoundError:
        raise Damaged(f"{path} is missing", _OLDER) from None
    except OSError as error:
        if error.errno not in NO_SUCH_FILE:
            raise
        raise Damaged(f"{path} {error.strerror}", _OLDER) from None
    # First, as a format that this version does not know is no damage.
    for listed in lists:
        if MANIFEST in listed:
            _compare(path, hashlib.sha256(content).hexdigest(), listed[MANIFEST])
    try:
        manifest = json.loads(content)
        form, whole = manifest["format"], all(type(manifest[name]) is int for name in ("step", "world_size"))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(f"{path} is damaged: {error!r}", _OLDER) from error
    if form != FORMAT:
        raise ValueError(f"{folder} has format {form!r}; this version reads format {FORMAT}")
    if not whole:
        raise Damaged(f"{path} is damaged: step or world_size is no whole number", _OLDER)
    return manifest


def _marked_ranks(path: Path, text: str, manifest: dict[str, Any]) -> Sequence[int]:
    """Returns the ranks whose files are in the folder, by its marker; adds to the manifest what the marker has of an
    evaluation. Raises Damaged if it contradicts the manifest."""
    step, size = manifest["step"], manifest["world_size"]
    try:
        marker = json.loads(text)
        ranks, later = marker["ranks"], {key: marker[key] for key in _ADDED if key in marker}
        good = marker["step"] == step and len(ranks) > 0 and all(type(r) is int and 0 <= r < size for r in ranks)
        good = good and all(one < two for one, two in pairwise(ranks))
    except (ValueError, KeyError, TypeError, RecursionError):
        good = False
    if not good:
        raise Damaged(f"{path} says {text[:80]!r}; expected step {step} and ranks below {size}, by rising number")
    manifest |= later
    return ranks
