"""MXNet's own RecordIO as an oracle."""

from collections.abc import Sequence

import pytest


def mxnet_pack(label: float | Sequence[float], content: bytes, number: int, number2: int = 0, flag: int = 0) -> bytes:
    recordio = pytest.importorskip("recipes.mxnet.library").mx.recordio
    return recordio.pack(recordio.IRHeader(flag, label, number, number2), content)
