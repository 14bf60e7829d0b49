"""Freed memory between training steps."""

import ctypes
import sys

import numpy as np
import pytest

from dualweaver.compute.allocator import keep_freed_memory

MEGABYTE = 2**20
BLOCK, BLOCKS = 8 * MEGABYTE, 30  # below the size that always goes back


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc"
)
def test_freed_memory_stays_inside_and_goes_back_at_the_end():
    before = resident()
    with keep_freed_memory():
        blocks = [np.ones(BLOCK, dtype=np.uint8) for _ in range(BLOCKS)]
        del blocks
        inside = resident()
    after = resident()
    assert inside - before > 0.8 * BLOCK * BLOCKS
    assert after - before < 0.2 * BLOCK * BLOCKS


def test_another_system_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail("asked for its C library"))
    with keep_freed_memory():
        pass
