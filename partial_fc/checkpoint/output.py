"""A new checkpoint, written by one process for any number of ranks."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from partial_fc import terminal
from partial_fc.checkpoint.files import checksums_name, save_tensors, write_checksums, write_json, write_lines
from partial_fc.checkpoint.folders import MANIFEST, mark, unmark
from partial_fc.checkpoint.head_state import FORMAT
from partial_fc.checkpoint.rows import Rows, cut, file_name
from partial_fc.files import make_folders
from partial_fc.head.shard import Shard


@dataclass
class Output:
    """The folder of a checkpoint being written."""

    folder: Path
    manifest: dict[str, Any]
    # Of each rank's files, by name.
    checksums: list[dict[str, str]]

    @property
    def world_size(self) -> int:
        return len(self.checksums)

    def tensors(self, name: str, tensors: dict[str, Tensor], rank: int = 0) -> None:
        self.checksums[rank][name] = save_tensors(tensors, self.folder / name)

    def text(self, name: str, lines: Iterable[str]) -> None:
        self.checksums[0][name] = write_lines(lines, self.folder / name)

    def rows(self, rows: Rows, table: str = "") -> None:
        """Writes a whole table; rows: of all classes. One file's rows at a time are in memory."""
        with terminal.bar(total=rows.stop, unit="class", desc="head", leave=False) as bar:
            for rank in range(self.world_size):
                shard = Shard.of(rows.stop, rank, self.world_size)
                for part in cut(rows, shard.start, shard.stop):
                    name = file_name(table, rank, self.world_size, part.start, part.stop)
                    self.tensors(name, part.tensors, rank)
                    bar.update(part.stop - part.start)


@contextlib.contextmanager
def new_checkpoint(
    folder: Path, manifest: dict[str, Any], class_names: list[str] | None, made_by: str
) -> Iterator[Output]:
    """Yields a folder that becomes a complete checkpoint when the `with` block ends, and is removed if it fails.
    manifest: has the number of ranks. made_by: a line for its history. Raises ValueError if it is not empty."""
    existed = folder.exists()
    if existed and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--out {folder} is there already; give a new folder")
    manifest = {**manifest, "format": FORMAT, "history": [*manifest.get("history", ()), made_by]}
    size = manifest["world_size"]
    output = Output(folder, manifest, [{} for _ in range(size)])
    try:
        make_folders(folder)
        yield output
        if class_names is not None:
            output.text("class-names.txt", class_names)
        output.checksums[0][MANIFEST] = write_json(manifest, folder / MANIFEST)
        for rank, checksums in enumerate(output.checksums):
            write_checksums(checksums, folder / checksums_name(rank, size))
        mark(folder, manifest["step"], range(size))
    except BaseException:
        with contextlib.suppress(OSError):  # the first failure is reported; the remains are incomplete, or whole
            unmark(folder)  # first, so that a partly removed folder is never complete
            for path in folder.iterdir():
                path.unlink()
            if not existed:
                folder.rmdir()
        raise


def print_notes(notes: Iterable[str]) -> None:
    for note in notes:
        print(f"note: {note}")
