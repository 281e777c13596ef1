"""A new checkpoint, written by one process for as many ranks as one likes."""

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor
from tqdm import tqdm

from partial_fc.checkpoint.checksums import checksums_name, write_checksums
from partial_fc.checkpoint.files import save_tensors, write, write_json
from partial_fc.checkpoint.folders import MANIFEST, mark
from partial_fc.checkpoint.rows import Rows, cut, file_name
from partial_fc.checkpoint.snapshot import FORMAT
from partial_fc.head.shard import Shard

_PIECE_BYTES = 8 << 20


class Output:
    """A folder that becomes a complete checkpoint when the `with` block ends, and vanishes if it fails."""

    def __init__(self, folder: Path, manifest: dict[str, Any], class_names: list[str] | None, made_by: str):
        """manifest: of the new checkpoint; its world_size says for how many ranks. made_by: a line for its history.
        Raises ValueError where the folder holds something."""
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"--out {folder} is there already; give a new folder")
        self.folder = folder
        self.manifest = {**manifest, "format": FORMAT, "history": [*manifest.get("history", ()), made_by]}
        self.class_names = class_names
        self._existed = folder.exists()
        self._checksums: list[dict[str, str]] = [{} for _ in range(manifest["world_size"])]

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._finish()
        elif self._existed:
            for path in self.folder.iterdir():
                path.unlink()
        else:
            shutil.rmtree(self.folder)

    def tensors(self, name: str, tensors: dict[str, Tensor], rank: int = 0) -> None:
        self._checksums[rank][name] = save_tensors(tensors, self.folder / name)

    def copy(self, path: Path, rank: int = 0) -> None:
        """A file as it is."""
        with path.open("rb") as file:
            pieces = iter(lambda: file.read(_PIECE_BYTES), b"")
            self._checksums[rank][path.name] = write(self.folder / path.name, pieces)

    def text(self, name: str, lines: Iterable[str]) -> None:
        self._checksums[0][name] = write(self.folder / name, (f"{line}\n".encode() for line in lines))

    def rows(self, rows: Rows) -> None:
        """The whole head; rows: of all classes. One file's rows at a time are in memory."""
        size = len(self._checksums)
        with tqdm(total=rows.stop, unit="class", desc="head", leave=False, disable=None) as bar:
            for rank, checksums in enumerate(self._checksums):
                shard = Shard.of(rows.stop, rank, size)
                for part in cut(rows, shard.start, shard.stop):
                    name = file_name(rank, size, part.start, part.stop)
                    checksums[name] = save_tensors(part.tensors, self.folder / name)
                    bar.update(part.stop - part.start)

    def _finish(self) -> None:
        if self.class_names is not None:
            self.text("class-names.txt", self.class_names)
        self._checksums[0][MANIFEST] = write_json(self.manifest, self.folder / MANIFEST)
        size = len(self._checksums)
        for rank, checksums in enumerate(self._checksums):
            write_checksums(checksums, self.folder / checksums_name(rank, size))
        mark(self.folder, self.manifest["step"], range(size))


def say(notes: Iterable[str], line: Callable[[str], None] = print) -> None:
    for note in notes:
        line(f"note: {note}")
