"""The benchmark protocol: which rows train, validate and test, and how they are scaled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from sklearn.preprocessing import StandardScaler

from dualweaver.errors import DataError, SettingError

__all__ = ["SPLIT_RULES", "ProtocolSegments", "Splits", "protocol_segments", "split_borders"]

SPLIT_RULES = ("ett-hour", "ett-minute", "ratio", "pems")

_ETT_MONTH = {"ett-hour": 30 * 24, "ett-minute": 30 * 24 * 4}


class Splits(NamedTuple):
    """Row ranges of the three parts of a table."""

    train: range
    validation: range
    test: range

    def with_context(self, context_length: int) -> Splits:
        """The same parts, validation and test starting ``context_length`` rows early.

        Their first forecast is then made for the first row of the part itself, and the number of windows does not
        depend on the context.
        """
        first = self.validation.start - context_length
        if context_length < 0 or first < 0:
            raise SettingError(f"context_length must lie in 0 ... {self.validation.start}, not {context_length}")
        return Splits(
            self.train,
            range(first, self.validation.stop),
            range(self.test.start - context_length, self.test.stop),
        )


def split_borders(rows: int, rule: str) -> Splits:
    """Row ranges of train, validation and test under a named rule, without context.

    - ``"ett-hour"``, ``"ett-minute"``: 12, 4 and 4 months of 30 days, hourly or every 15 minutes; what follows the
      20 months is not used.
    - ``"ratio"``: the first 70 % train, the last 20 % test, both rounded down; the rest validates.
    - ``"pems"``: 60, 20 and 20 %, the borders rounded down.
    """
    if rule in _ETT_MONTH:
        month = _ETT_MONTH[rule]
        borders = (12 * month, 16 * month, 20 * month)
    elif rule == "ratio":
        borders = (int(rows * 0.7), rows - int(rows * 0.2), rows)
    elif rule == "pems":
        borders = (int(rows * 0.6), int(rows * 0.8), rows)
    else:
        raise SettingError(f"unknown split rule {rule!r}; known: {', '.join(SPLIT_RULES)}")
    train, validation, test = borders
    if not 0 < train < validation < test <= rows:
        raise DataError(f"{rows} rows are too few for the split rule {rule!r}" + _needs(rule, test))
    return Splits(range(train), range(train, validation), range(validation, test))


def _needs(rule: str, rows: int) -> str:
    return f", which needs {rows}" if rule in _ETT_MONTH else ""


@dataclass(frozen=True)
class ProtocolSegments:
    """The three parts of a table, each ``[time, channel]`` in float64, ready for windows.

    ``splits`` are the rows that the parts cover in the table, context included; ``scaler`` holds the statistics of
    the train rows and maps forecasts back (None if the parts were left in the data's units).
    """

    train: npt.NDArray[np.float64]
    validation: npt.NDArray[np.float64]
    test: npt.NDArray[np.float64]
    splits: Splits
    scaler: StandardScaler | None


def protocol_segments(
    table: pd.DataFrame | npt.ArrayLike, rule: str, context_length: int, *, scale: bool = True
) -> ProtocolSegments:
    """Cut a table ``[time, channel]`` as the published benchmarks do, and standardise it by its train rows.

    A part of ``n`` rows has ``n - (context + horizon) + 1`` windows, that is, ``window_starts([n], context +
    horizon)``. Validation and test start ``context_length`` rows early, except under ``"pems"``, whose published
    loader keeps the parts disjoint.

    Mean and population standard deviation are scikit-learn's: missing values do not count and stay missing, and a
    channel constant in training gets scale 1. The published code divides by the deviation plus 1e-5 instead. The two
    agree to a relative 1e-5 on channels of unit size; on a channel constant in training, theirs turns the smallest
    later move into 1e5 times its size.
    """
    values = np.ascontiguousarray(table, dtype=np.float64)
    if values.ndim != 2:
        raise DataError(f"the table must be [time, channel], not {list(values.shape)}")
    splits = split_borders(len(values), rule)
    if rule != "pems":
        splits = splits.with_context(context_length)
    scaler = StandardScaler().fit(values[_rows(splits.train)]) if scale else None
    if scaler is not None:
        values = scaler.transform(values)
    train, validation, test = (values[_rows(part)] for part in splits)
    return ProtocolSegments(train, validation, test, splits, scaler)


def _rows(part: range) -> slice:
    return slice(part.start, part.stop)
