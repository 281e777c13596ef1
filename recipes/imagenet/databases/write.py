"""Writer of image databases (LMDB) that Caffe, Caffe2 and this project read.

A folder appears atomically. Give keys in ascending order if possible: LMDB then writes each page once.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import lmdb
import numpy as np
from numpy.typing import NDArray

from partial_fc.files import check_new

from .records import BYTE, INT32, STRING, Datum, TensorProtos

Format = Literal["datum", "tensorprotos"]
Put = Callable[[bytes, bytes], None]

_MAP_BYTES = 2**40  # address space, not memory or disk, as in Caffe2
_COMMIT_EVERY = 1000


def encode_record(image: bytes | NDArray[np.uint8], label: int, format: Format) -> bytes:
    """Encodes a record. image: an image file, or uint8 (H, W, 3) RGB or (H, W, 1) grey, which is written as BGR."""
    if isinstance(image, bytes):
        if format == "datum":
            return Datum(data=image, label=label, encoded=True).SerializeToString()
        return _tensors({"data_type": STRING, "dims": [1], "string_data": [image]}, label)
    bgr_HWC = image[..., ::-1]
    if format == "datum":
        height, width, channels = bgr_HWC.shape
        data = bgr_HWC.transpose(2, 0, 1).tobytes()
        return Datum(channels=channels, height=height, width=width, data=data, label=label).SerializeToString()
    return _tensors({"data_type": BYTE, "dims": bgr_HWC.shape, "byte_data": bgr_HWC.tobytes()}, label)


def _tensors(image: dict, label: int) -> bytes:
    return TensorProtos(protos=[image, {"data_type": INT32, "dims": [1], "int32_data": [label]}]).SerializeToString()


@contextmanager
def lmdb_writer(path: Path) -> Iterator[Put]:
    """Yields put(key, value) of an LMDB. Raises ValueError if the folder exists, a key repeats or the disk fails."""
    try:
        with (
            _new_folder(path) as folder,
            lmdb.open(str(folder), map_size=_MAP_BYTES, sync=False, lock=False) as environment,
        ):
            transaction, count = environment.begin(write=True), 0

            def put(key: bytes, value: bytes) -> None:
                nonlocal transaction, count
                if not transaction.put(key, value, overwrite=False):
                    raise ValueError(f"{path}: two records have the key {key.decode('utf-8', 'backslashreplace')}")
                count += 1
                if count % _COMMIT_EVERY == 0:
                    transaction.commit()
                    transaction = environment.begin(write=True)

            yield put
            transaction.commit()
            environment.sync(True)
    except lmdb.Error as error:
        raise ValueError(f"{path} cannot be written: {error}") from error


@contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    check_new(path)
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed run
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # frees a full disk
        raise
