"""Missing values: the policy that fills them, and the report of everything that was repaired."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from dualweaver.data.times import quoted
from dualweaver.errors import DataError, SettingError

__all__ = ["POLICIES", "MissingPolicy", "Report", "check_policy", "fill", "refuse_missing"]

MissingPolicy = Literal["interpolate", "ffill", "raise"]
POLICIES: tuple[MissingPolicy, ...] = ("interpolate", "ffill", "raise")


@dataclass
class Report:
    """What was found and repaired while a table was read; counts are cells or rows over all entities."""

    rows: int = 0
    rows_inserted: int = 0  # steps of the grid that had no row
    stamps_moved: int = 0  # stamps that a given freq= moved onto the grid
    sorted: bool = False  # the rows were out of order
    missing: dict[Hashable, int] = field(default_factory=dict)  # column -> cells without a value, among given rows
    infinite: dict[Hashable, int] = field(default_factory=dict)  # column -> cells that held inf or -inf
    sentinels: dict[Hashable, int] = field(default_factory=dict)  # column -> cells that held one of missing_values
    casts: dict[Hashable, str] = field(default_factory=dict)  # column -> the type it was cast from
    ignored: tuple[Hashable, ...] = ()  # columns that were not used
    notices: list[str] = field(default_factory=list)  # the same in words: what was warned about

    @property
    def clean(self) -> bool:
        """Nothing had to be filled, moved or sorted."""
        filled = self.missing or self.infinite or self.sentinels or self.rows_inserted
        return not (filled or self.stamps_moved or self.sorted)


def check_policy(missing: str) -> None:
    if missing not in POLICIES:
        raise SettingError(f"missing={missing!r} is not a policy: it takes {quoted(POLICIES)}")


def refuse_missing(report: Report) -> None:
    """What `missing="raise"` means: an error that names every column with its count."""
    parts = []
    for what, counts in (
        ("missing values in", report.missing),
        ("infinite values in", report.infinite),
        ("values listed in missing_values in", report.sentinels),
    ):
        if counts:
            named = [f"{label!r} ({count})" for label, count in counts.items()]
            parts.append(f"{what} {', '.join(named[:8])}" + (f" and {len(named) - 8} more" if len(named) > 8 else ""))
    if report.rows_inserted:
        parts.append(f"{report.rows_inserted} steps without a row")
    if parts:
        raise DataError(
            f"missing='raise' and the table has {'; '.join(parts)}: fill them, or pass missing='interpolate' or 'ffill'"
        )


def fill(values: np.ndarray, observed: np.ndarray, missing: str) -> None:
    """Fill the gaps of `values` `[time, channel]` in place, each channel on its own.

    "interpolate" is linear in the steps of the grid, and takes the nearest value before the first and after the
    last known one. "ffill" repeats the last known value, and takes the first one before it. Every channel must
    have a known value.
    """
    steps = np.arange(len(values))
    for channel in np.flatnonzero(~observed.all(axis=0)):
        known = observed[:, channel]
        where, gap = np.flatnonzero(known), np.flatnonzero(~known)
        if missing == "ffill":
            last = np.maximum.accumulate(np.where(known, steps, where[0]))
            values[gap, channel] = values[last[gap], channel]
        else:
            values[gap, channel] = np.interp(gap, where, values[where, channel])
