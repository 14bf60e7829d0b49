"""How freed memory is kept between training steps.

The C library of Linux gives memory back to the system as soon as some tens of megabytes at the end of its heap are
free. A training step frees what it kept for its backward pass, several hundred megabytes, and asks for the same again a
moment later: every page is then cleared anew, a tenth of a step of a small backbone.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["keep_freed_memory", "return_freed_memory"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
_LARGEST_FREE = 1 << 30  # bytes that stay with the process
_SMALL_BLOCK = 64 << 10
_LARGEST_BLOCK = 32 << 20  # larger ones always go back: the C library's own upper limit


def _library() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    known = library is not None and hasattr(library, "mallopt") and hasattr(library, "malloc_trim")
    return library if known else None


@contextmanager
def return_freed_memory() -> Iterator[None]:
    """Give freed memory back at once inside, so that the size of the process is that of what is in use."""
    library = _library()
    if library is None:
        yield
        return
    library.mallopt(_MMAP_THRESHOLD, _SMALL_BLOCK)
    library.malloc_trim(0)
    try:
        yield
    finally:
        library.mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK)


@contextmanager
def keep_freed_memory() -> Iterator[None]:
    """Keep freed memory inside; give it back at the end. Does nothing where the C library is another one."""
    library = _library()
    if library is None:
        yield
        return
    library.mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK)
    library.mallopt(_TRIM_THRESHOLD, _LARGEST_FREE)
    try:
        yield
    finally:
        library.mallopt(_TRIM_THRESHOLD, 2 * _LARGEST_BLOCK)  # where the library's own rule ends up after large blocks
        library.malloc_trim(0)
