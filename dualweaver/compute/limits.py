"""What a user may ask for: bytes as text, and processes that share a batch."""

from __future__ import annotations

import os
import re
from typing import Any

from dualweaver.errors import SettingError

__all__ = ["CAUTIOUS", "check_devices", "parse_bytes", "processes"]

CAUTIOUS = 64  # series at once in forecasts that are made before there is a plan
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_bytes(value: str | float) -> int:
    """Bytes of "2GB", "1.5 GiB", "800M" or a number.

    Raises:
        SettingError: it is none of these.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:e\+?\d+)?)\s*((?:[KMGT]I?)?)B?\s*", str(value), re.IGNORECASE)
    size = float(found[1]) * _UNITS[found[2].upper()] if found else 0.0
    if isinstance(value, bool) or size < 1:
        raise SettingError(f"memory_budget={value!r}: expected bytes, such as '2GB', '1.5GiB' or 8e9")
    return int(size)


def check_devices(devices: int, batch_size: int) -> None:
    """Raise a SettingError where so many processes are not there, or cannot share a batch evenly."""
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise SettingError(f"devices={devices!r}: expected a whole number, 1 or more")
    if batch_size % devices:
        raise SettingError(f"devices={devices}: expected a divisor of batch_size={batch_size}")
    running = int(os.environ.get("WORLD_SIZE", 1))
    if devices > 1 and running != devices:
        raise SettingError(
            f"devices={devices}, but {running} processes run this script: start it with "
            f"`torchrun --nproc-per-node {devices} script.py`, or on several machines with as many in all"
        )


def processes(devices: int) -> dict[str, Any]:
    """What the trainer is told of the processes that torchrun has started."""
    if devices == 1:
        return {}
    here = int(os.environ.get("LOCAL_WORLD_SIZE", devices))
    return {"devices": here, "nodes": devices // here, "strategy": "ddp"}
