"""The only package that imports MXNet: `from .library import mx`.

MXNet 1.9.1 (2022, the last release) uses names that numpy has removed since. During its import numpy gets them back;
two that it also looks up later stay. Its two functions that call `tostring`, which numpy 2.3 removed, call `tobytes`
here.

MXNet takes as many threads as torch has; by itself it would set half of the cores for both.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

# bool: missing in 1.24 to 1.26 only. Inf: EarlyStoppingHandler.
_LOOKED_UP_LATER = {"bool": bool, "Inf": np.inf}
_LENT = {
    "int": int,
    **dict.fromkeys(("NAN", "NaN"), np.nan),
    "PINF": np.inf,
    "NINF": -np.inf,
    "PZERO": 0.0,
    "NZERO": -0.0,
    "alltrue": np.all,
    "sometrue": np.any,
    "in1d": np.isin,
    "msort": partial(np.sort, axis=0),
    "trapz": getattr(np, "trapezoid", None),
    "product": np.prod,
    "round_": np.round,
    # mx.np re-exports these, which left numpy in 1.20.
    **dict.fromkeys(("mirr", "npv", "pmt", "ppmt", "pv", "rate")),
}


@contextmanager
def _lend() -> Iterator[None]:
    """Restores numpy's removed names while MXNet is imported."""
    missing = {name: value for name, value in {**_LENT, **_LOOKED_UP_LATER}.items() if name not in vars(np)}
    for name, value in missing.items():
        setattr(np, name, value)
    try:
        yield
    finally:
        for name in missing.keys() - _LOOKED_UP_LATER.keys():
            delattr(np, name)


@contextmanager
def _threads_of_torch() -> Iterator[None]:
    """Makes MXNet use torch's number of threads, which torch keeps. OMP_NUM_THREADS sets both."""
    name = "MXNET_OMP_MAX_THREADS"
    torch = sys.modules.get("torch")
    if torch is None or "OMP_NUM_THREADS" in os.environ or name in os.environ:
        yield
        return
    threads = torch.get_num_threads()
    os.environ[name] = str(threads)
    try:
        yield
    finally:
        del os.environ[name]
        torch.set_num_threads(threads)


try:
    with _lend(), _threads_of_torch():
        import mxnet as mx
except ModuleNotFoundError as error:
    missing = (error.name or "").partition(".")[0]
    to_do = {
        "mxnet": "`pip install --no-deps mxnet==1.9.1` (without its dependencies: it asks for a numpy of 2022)",
        "distutils": "`pip install setuptools` (since 3.12 it is not Python's own)",
    }.get(missing, f"`pip install {missing}`")
    raise ModuleNotFoundError(f"MXNet cannot be imported, for want of {missing}: {to_do}", name=error.name) from error

for _function in (mx.recordio.pack, mx.recordio.pack_img):
    _code = _function.__code__
    _function.__code__ = _code.replace(co_names=tuple("tobytes" if n == "tostring" else n for n in _code.co_names))
