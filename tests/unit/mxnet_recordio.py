"""MXNet's own RecordIO as an oracle: its `pack` with today's numpy."""

from collections.abc import Sequence
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest


class _Array(np.ndarray):
    tostring = np.ndarray.tobytes  # numpy 2.3 removed it


def mxnet_pack(label: float | Sequence[float], content: bytes, number: int, number2: int = 0, flag: int = 0) -> bytes:
    recordio = pytest.importorskip("partial_fc.mxnet").mx.recordio
    numpy = SimpleNamespace(asarray=lambda *values, **options: np.asarray(*values, **options).view(_Array))
    numpy.float32 = np.float32
    with mock.patch.object(recordio, "np", numpy):
        return recordio.pack(recordio.IRHeader(flag, label, number, number2), content)
