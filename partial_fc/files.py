"""Files that take the place of older ones at once, or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path, durable: bool = False) -> Iterator[Path]:
    """Gives a name beside `path` to write to; when the block ends, that file takes the place of `path`, and if it
    fails, vanishes. durable: it is on the disk before it has its name; the folder must be synced (`sync_folder`) before
    the name can be relied on. Raises OSError with `path`.

        with replacing(path) as partial:
            partial.write_text("all of it")
    """
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        if durable:
            _sync(partial, os.O_RDONLY)
        os.replace(partial, path)
    except BaseException as error:
        # What a full disk needs most is room.
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename in (None, str(partial)):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def sync_folder(path: Path) -> None:
    """Names given and taken in this folder are on the disk when this returns."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
