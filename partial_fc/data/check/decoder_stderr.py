"""What image decoders write to stderr. libjpeg fills what is missing or garbled in a JPEG with grey, returns an image
as if nothing were wrong, and reports it nowhere else."""

import os
import tempfile
from typing import Self, TextIO


class DecoderStderr:
    """Within its block what anything in this process writes to stderr goes to a file without a name, to be read here.
    The descriptor belongs to the whole process: for commands, not for a run that trains."""

    def __enter__(self) -> Self:
        self._file = tempfile.TemporaryFile()
        self._before = os.dup(2)
        os.dup2(self._file.fileno(), 2)
        self.terminal: TextIO = os.fdopen(os.dup(self._before), "w")
        """The stderr of before, for a progress bar."""
        return self

    def __exit__(self, *error: object) -> None:
        os.dup2(self._before, 2)
        os.close(self._before)
        self.terminal.close()
        self._file.close()

    def new_lines(self) -> list[str]:
        """The lines written since the last call."""
        if os.fstat(self._file.fileno()).st_size == 0:
            return []
        self._file.seek(0)
        written = self._file.read().decode(errors="replace")
        self._file.truncate(0)
        # Both descriptors share one position.
        self._file.seek(0)
        return written.splitlines()
