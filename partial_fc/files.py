"""Files: atomic and durable replacement, safe reads of untrusted paths, folders, and modes."""

import contextlib
import errno
import importlib.util
import os
import platform
import re
import stat
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

TEXT_BYTES = 4 << 30  # of a text that is read as a whole: a name each for a hundred million classes
MANIFEST_BYTES = 2 << 20  # of a manifest or other JSON, which takes up to thirty times as much memory when read
_RATES = re.compile(rb'"rates": \[[-+0-9.eE,\s]*\]')  # of all steps (--head-catch-up exact), some 29 bytes each
_RATES_BYTES = 128 << 20  # which take up to eight times as much memory when read
_NAMED = re.compile(r"([A-Za-z]\w*)=(.+)", re.ASCII)
NO_SUCH_FILE = (errno.EINVAL, errno.EFBIG, errno.EISDIR, errno.ELOOP)  # errors of `read_bytes` for paths that exist
PRIVATE = 0o077
"""The umask by which only the owner can use a file."""


def named(path: Path) -> tuple[str, Path]:
    """Splits NAME=PATH into (name, path); ("", path) for any other path, and for a file of that very name."""
    match = None if path.exists() else _NAMED.fullmatch(str(path))
    return (match[1], Path(match[2])) if match else ("", path)


def make_private() -> None:
    """Sets the umask of this process, and those that it starts, so that files and folders are their owner's alone: they
    hold names of people, and weights learned from them. PARTIAL_FC_UMASK in the environment overrides it, as umask(1):
    027 for a group that works together. Raises ValueError for an invalid one."""
    text = os.environ.get("PARTIAL_FC_UMASK")
    if text is None:
        os.umask(os.umask(PRIVATE) | PRIVATE)
        return
    if not (text.isdecimal() and len(text) <= 4 and set(text) <= set("01234567") and int(text, 8) <= 0o777):
        raise ValueError(f"PARTIAL_FC_UMASK is {text!r}; expected a umask such as 077, 027 or 022")
    os.umask(int(text, 8))


def in_cache(kind: str, name: str) -> Path:
    """Returns the path of a file in this user's cache, existing or still to be written; creates its folder.

    That is $XDG_CACHE_HOME/partial-fc/KIND, or ~/.cache/partial-fc/KIND. If that is not writable and lacks the file, it
    is a folder of mode 700 in the temporary directory, with a RuntimeWarning. Raises OSError if it is another user's.
    """
    try:
        path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "partial-fc" / kind / name
        if path.exists():
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        if os.access(path.parent, os.W_OK | os.X_OK):
            return path
        reason = f"{path.parent} cannot be written"
    except (OSError, RuntimeError) as error:  # RuntimeError: HOME is not set, and the user has no entry in passwd
        reason = str(error).rstrip(".")
    folder = Path(tempfile.gettempdir()) / f"partial-fc-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & PRIVATE:
        raise PermissionError(errno.EPERM, f"{reason}, and others can write here: set XDG_CACHE_HOME", str(folder))
    warnings.warn(
        f"the cache cannot be used ({reason}); its files are kept in {folder}. XDG_CACHE_HOME names another folder",
        RuntimeWarning,
        stacklevel=2,
    )
    (folder / kind).mkdir(exist_ok=True)
    return folder / kind / name


def regular(path: str | os.PathLike[str], flags: int) -> int:
    """Opens regular files, and links to such, as the `opener` of open(). A device may never end, a FIFO may block, and
    opening can have side effects. Raises OSError, as open does."""
    check_regular(path)
    # If it has become a FIFO meanwhile, do not block on it.
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _check_regular(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raises OSError for what `regular` does not open, before a library opens a file by its name."""
    _check_regular(os.stat(path), path)


def _check_regular(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "no regular file, but a device, a FIFO or a socket", str(path))


def read_bytes(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """Returns the contents of a regular file. Raises OSError for other files, larger ones, and as open does."""
    with about(path), open(path, "rb", opener=regular) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"has {size:,} bytes; at most {most_bytes:,} are read", str(path))
        return file.read()


def read_manifest(path: str | os.PathLike[str]) -> bytes:
    """Returns a checkpoint's manifest. Raises OSError as `read_bytes` for more than MANIFEST_BYTES, without lists of
    learning rates, which grow with the run."""
    content = read_bytes(path, MANIFEST_BYTES + _RATES_BYTES)
    if len(content) > MANIFEST_BYTES and (size := len(_RATES.sub(b"", content))) > MANIFEST_BYTES:
        more = f"has {size:,} bytes beside learning rates; at most {MANIFEST_BYTES:,} are read"
        raise OSError(errno.EFBIG, more, str(path))
    return content


def read_text(path: str | os.PathLike[str], most_bytes: int = TEXT_BYTES, encoding: str = "utf-8",
              errors: str = "strict") -> str:  # fmt: skip
    """Returns a regular file's text. Raises OSError as `read_bytes`, ValueError for invalid text."""
    try:
        return read_bytes(path, most_bytes).decode(encoding, errors)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not {encoding.upper()}: {error.reason} at byte {error.start:,}") from None


@contextmanager
def replacing(path: Path, durable: bool = False, shared: bool = False) -> Iterator[Path]:
    """Yields a name beside `path` to write to; at the end of the block that file replaces `path`; if it fails, it is
    removed. durable: synced before it gets its name; the folder must be synced (`sync_folder`) for the name to be
    durable. shared: several processes may write it at once. Raises OSError with `path`.

        with replacing(path) as partial:
            partial.write_text("all of it")
    """
    own = f".{platform.node()}.{os.getpid()}" if shared else ""
    partial = path.with_name(f"{path.name}{own}.partial")
    try:
        yield partial
        if durable:
            _sync(partial, os.O_RDONLY)
        os.replace(partial, path)
    except BaseException as error:
        # A full disk needs space. If the removal fails, too, the first error is raised.
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename in (None, str(partial)):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def import_file(path: Path, name: str) -> ModuleType:
    """Runs a Python file and returns it as the module `name`."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up field types there
    spec.loader.exec_module(module)
    return module


def check_new(*paths: Path) -> None:
    """Raises ValueError if the path exists: before work whose result could not be written."""
    for path in paths:
        if path.exists():
            raise ValueError(f"{path} exists; remove it or choose another name")


def sync_folder(path: Path) -> None:
    """Syncs a folder, so that its names are on the disk."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def make_folders(path: Path) -> None:
    """Creates a folder and its missing parents, and syncs their names up to the root of the file system, as far as
    folders are readable, since an interrupted call may have created some of them."""
    path.mkdir(parents=True, exist_ok=True)
    path = path.resolve()
    device = path.stat().st_dev
    for folder in path.parents:
        if folder.stat().st_dev != device or not os.access(folder, os.R_OK):
            return
        sync_folder(folder)


@contextmanager
def about(path: str | os.PathLike[str]) -> Iterator[None]:
    """Adds this file to errors of the system that name none, such as those of reading and syncing."""
    try:
        yield
    except OSError as error:
        if error.errno and error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def _sync(path: Path, flags: int) -> None:
    with about(path):
        descriptor = os.open(path, flags)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
