"""Warnings that point at the user's own line, however deep inside the package they arise."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

__all__ = ["notify"]

_PACKAGE = str(Path(__file__).parent)


def notify(message: str) -> None:
    """Warn of something that was repaired or decided, with the line that called the package as its place."""
    level, depth, frame = 1, 1, sys._getframe()
    while (caller := frame.f_back) is not None:  # to the end: Lightning may lie between our own frames
        if frame.f_code.co_filename.startswith(_PACKAGE):
            level = depth + 1
        depth, frame = depth + 1, caller
    warnings.warn(message, UserWarning, stacklevel=level)
