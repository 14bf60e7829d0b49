"""Warnings that point at the user's own line, however deep inside the package they arise."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

__all__ = ["notify"]

_PACKAGE = str(Path(__file__).parent)


def notify(message: str) -> None:
    """Warn of something that was repaired or decided, with the first line outside of the package as its place."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)
