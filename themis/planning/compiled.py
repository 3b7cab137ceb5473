"""The one way kernels are compiled, and how arrays reach them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numpy.typing import ArrayLike, NDArray

from themis.core.errors import is_whole, reject, require

_FLOAT64 = np.dtype(np.float64)
_INT64 = np.dtype(np.int64)
_BOOL = np.dtype(np.bool_)


def compiled(kernel: Callable[..., Any]) -> Any:
    """`kernel` compiled by Numba on first call, free of the interpreter lock, cached on disk where a disk will have it.

    Numba falls back from the package's directory to the user's cache directory by itself; where neither can be
    written it refuses, and then the kernel is compiled anew in each process.
    """
    try:
        return numba.njit(cache=True, nogil=True)(kernel)
    except RuntimeError:
        return numba.njit(nogil=True)(kernel)


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    """A read-only view: kernels take read-only inputs alone, so that each is compiled for one signature."""
    view = array.view()
    view.setflags(write=False)
    return view


def floats(values: ArrayLike, name: str, num_dims: int) -> NDArray[np.float64]:
    """`values` as a read-only C-contiguous float64 array; ConfigError unless numbers in `num_dims` dimensions."""
    return _array(values, name, num_dims, _FLOAT64, "fiub", "numbers")


def ints(values: ArrayLike, name: str, num_dims: int) -> NDArray[np.int64]:
    """`values` as a read-only C-contiguous int64 array; ConfigError unless whole numbers in `num_dims` dimensions."""
    return _array(values, name, num_dims, _INT64, "iu", "whole numbers")


def bools(values: ArrayLike, name: str, num_dims: int) -> NDArray[np.bool_]:
    """`values` as a read-only C-contiguous bool array; ConfigError unless booleans in `num_dims` dimensions."""
    return _array(values, name, num_dims, _BOOL, "b", "booleans")


def _array(values: ArrayLike, name: str, num_dims: int, dtype: np.dtype[Any], kinds: str, wanted: str) -> NDArray[Any]:
    array = values if isinstance(values, np.ndarray) else np.asarray(values)
    if array.dtype != dtype or not array.flags.c_contiguous:
        if array.dtype.kind not in kinds:
            reject(name, f"of type {array.dtype}", wanted)
        array = np.asarray(array, dtype=dtype, order="C")
    if array.ndim != num_dims:
        reject(name, f"of shape {array.shape}", f"an array of {num_dims} dimension(s)")
    return _frozen(array)


def whole(value: object, name: str, least: int) -> int:
    """`value` as an int of at least `least`; else ConfigError."""
    require(is_whole(value, least), name, value, f"a whole number, {least} or more")
    return int(value)  # type: ignore[call-overload, no-any-return]
