"""Host memory for training on a CPU."""

from __future__ import annotations

import ctypes
import sys

# glibc's names for the knobs of mallopt, from <malloc.h>.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_KEPT_BYTES = 2**31 - 1


def keep_host_memory() -> bool:
    """Let the process keep freed memory instead of handing it back to the system; whether that was possible.

    glibc gives every tensor above 32 MiB fresh pages, which the kernel must clear and map one by one, in each step
    anew. Kept memory spares that; the process then stays as large as it once was. Call it before the first large
    tensor. It acts on the whole process, so it is for programs, such as `themis train`, to choose. Linux with glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _KEPT_BYTES), (_M_TOP_PAD, 64 * 2**20))
    return all(bool(mallopt(knob, value)) for knob, value in settings)
