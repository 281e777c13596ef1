"""A copy of a table's rows as they are at one moment, made while training goes on.

To begin it is bookkeeping. Whoever needs the copy makes it, chunk by chunk, in a thread of its own (`finish`). A row
may be changed only when it has been copied: a step's rows are put first where the step begins (`want`), and before it
changes them (`settle`) the training thread copies what is left of them, too, and waits for the chunks that the other
one has in hand. A chunk is taken under a lock, and its rows count as taken from then on: no row is read while it is
written, or after.

L rows of the table, C groups of them (the sub-centres of a class), N groups that are copied, K rows of a chunk.
"""

import ctypes
import functools
import threading
from collections.abc import Callable

from torch import Tensor

from partial_fc.head.native.library import loaded

_CHUNK_BYTES = 2 << 20


class RowCopy:
    """The rows that exist now, of all tables; groups of which some exist are there as a whole."""

    def __init__(self, tables: dict[str, Tensor], exists_L: Tensor, group: int):
        """tables: (L, width), on the CPU. Raises MemoryError."""
        self._tables, self._group = tables, group
        self.created_C = exists_L.view(-1, group).any(dim=1)
        # Where the rows of a created group begin in `copies`, in groups.
        self.place_C = self.created_C.cumsum(0) - 1
        num_rows = int(self.created_C.sum()) * group
        try:
            self.copies = {name: t.new_empty(num_rows, t.shape[1]) for name, t in tables.items()}
        except RuntimeError as error:  # so says torch's allocator that there is no memory
            raise MemoryError(str(error)) from error
        self._copy_rows = rows_copier()
        row_bytes = sum(t.shape[1] * t.element_size() for t in tables.values())
        self._chunk = max(1, _CHUNK_BYTES // row_bytes)
        # Everything below is read and changed under the lock.
        self._lock = threading.Condition()
        self._left_L = exists_L.clone()
        if group > 1:  # the others of a group are zeros
            self._left_L.view(-1, group).logical_or_(self.created_C[:, None])
        self._wanted: list[Tensor] = []
        self._all_wanted = False
        self._next = 0  # from here on chunks are taken when none is wanted
        self._in_hand: set[object] = set()  # one for each chunk that is being copied
        self._error: Exception | None = None

    def want(self, row_S: Tensor | None) -> None:
        """Announces rows (None: all) that will change after `settle`. Called from the training thread, like
        `settle`."""
        with self._lock:
            if row_S is None:
                self._all_wanted = True
            else:
                self._wanted.extend(row_S[self._left_L[row_S]].split(self._chunk))

    def settle(self) -> None:
        """Waits until the announced rows are copied. A failure is raised by `finish`: training goes on."""
        self._work(wanted_only=True)

    def finish(self) -> None:
        """Copies all remaining rows. Raises MemoryError if there was no memory, here or in `settle`."""
        self._work(wanted_only=False)
        if self._error is not None:
            raise MemoryError(f"there is no memory for a copy of the centres: {self._error}") from self._error

    def _work(self, wanted_only: bool) -> None:
        while (taken := self._take(wanted_only)) is not None:
            row_K, hand = taken
            try:
                self._copy(row_K)
            except (MemoryError, RuntimeError) as error:  # torch's allocator raises the latter
                with self._lock:  # the copy is given up
                    self._error = error
                    self._left_L.zero_()
            finally:
                with self._lock:
                    self._in_hand.discard(hand)
                    self._lock.notify_all()
        with self._lock:  # for what is in another's hand now; what that takes later are other rows
            others = set(self._in_hand)
            self._lock.wait_for(lambda: not others & self._in_hand)

    def _take(self, wanted_only: bool) -> tuple[Tensor, object] | None:
        """The next rows to copy, ascending, and what stands for them while they are in hand; None: there are none."""
        with self._lock:
            row_K = self._next_rows(wanted_only)
            if row_K is None:
                return None
            self._left_L[row_K] = False
            hand = object()  # a new one each time: who waits for these rows does not wait for later ones
            self._in_hand.add(hand)
            return row_K, hand

    def _next_rows(self, wanted_only: bool) -> Tensor | None:
        while self._wanted:
            row_K = self._wanted.pop()
            row_K = row_K[self._left_L[row_K]]
            if len(row_K):
                return row_K
        while self._next < len(self._left_L) and (self._all_wanted or not wanted_only):
            begin, self._next = self._next, self._next + self._chunk
            at_K = self._left_L[begin : self._next].nonzero().squeeze(1)
            if len(at_K):
                return at_K.add_(begin)
        return None

    def _copy(self, row_K: Tensor) -> None:
        to_K = self.place_C[row_K // self._group].mul_(self._group).add_(row_K % self._group)
        first, last, to = int(row_K[0]), int(row_K[-1]), int(to_K[0])
        for name, table in self._tables.items():
            if last - first + 1 == len(row_K):  # neighbours, also where they go
                self.copies[name][to : to + len(row_K)] = table[first : last + 1]
            else:
                self._copy_rows(self.copies[name], table, to_K, row_K)


@functools.cache
def rows_copier() -> Callable[[Tensor, Tensor, Tensor, Tensor], object]:
    """copy(to_MD, from_LD, to_K, from_K): rows of one table to places in another one, both without gaps. By the C++
    kernel's library, which is compiled where that kernel is; torch goes over them twice, at a third of the speed."""
    if not (compiled := loaded()):
        return lambda to_MD, from_LD, to_K, from_K: to_MD.index_copy_(0, to_K, from_LD.index_select(0, from_K))
    copy_rows = compiled.head_copy_rows
    copy_rows.restype = None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    copy_rows.argtypes = [pointer, pointer, number, pointer, pointer, number]

    def copy(to_MD: Tensor, from_LD: Tensor, to_K: Tensor, from_K: Tensor) -> None:
        row_bytes = from_LD.shape[1] * from_LD.element_size()
        copy_rows(to_MD.data_ptr(), from_LD.data_ptr(), row_bytes, to_K.data_ptr(), from_K.data_ptr(), len(to_K))

    return copy
