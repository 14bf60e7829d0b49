"""The numbers of a table: which channels are wanted, cast and put in their place on the grid."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from dualweaver.data.axis import Ids, Segment, number_keys
from dualweaver.data.layout import LONG_COLUMNS
from dualweaver.data.missing import Report
from dualweaver.data.numeric import NotNumericError, as_float, name_dtype
from dualweaver.data.times import quoted
from dualweaver.errors import DataError

__all__ = ["choose", "read_ids", "read_long", "read_wide"]


def choose(names: list[Hashable], wanted: Sequence[Hashable] | None, report: Report) -> list[Hashable]:
    """The channels to use: all, or those of the fitted table, which must all be there."""
    if wanted is None:
        return names
    lacking = [label for label in wanted if label not in set(names)]
    if lacking:
        raise DataError(
            f"the table lacks {quoted(lacking)}, which the model was fitted on: it expects {quoted(wanted)} and found "
            f"{quoted(names)}"
        )
    extra = tuple(label for label in names if label not in set(wanted))
    if extra:
        report.ignored += extra
        report.notices.append(f"{quoted(extra)} was not there when the model was fitted: ignored")
    return list(wanted)


def read_ids(frame: pd.DataFrame) -> Ids:
    """The channels of a table in the long form, as they first appear."""
    return Ids(*number_keys(frame[LONG_COLUMNS[0]], LONG_COLUMNS[0]))


def read_wide(
    frame: pd.DataFrame, chosen: list[Hashable], segments: list[Segment], missing_values: Sequence[Any], report: Report
) -> list[np.ndarray]:
    """The values `[time, channel]` of each segment; what is not finite is missing."""
    values = [np.full((len(segment.index), len(chosen)), np.nan) for segment in segments]
    place: dict[Hashable, int] = {label: position for position, label in enumerate(frame.columns.tolist())}
    refused = []
    for channel, label in enumerate(chosen):
        column = frame.iloc[:, place[label]]
        try:
            numbers, sentinel = as_float(column, missing_values)
        except NotNumericError as error:
            refused.append(f"column {label!r} {error}")
            continue
        _note_cast(report, label, column)
        _count(report.sentinels, label, sentinel.sum())
        _count(report.missing, label, np.isnan(numbers).sum() - sentinel.sum())
        _count(report.infinite, label, np.isinf(numbers).sum())
        for segment, grid in zip(segments, values, strict=True):
            grid[segment.positions, channel] = numbers[segment.rows]
    if refused:
        intro = "the table has no numeric column: " if len(refused) == len(chosen) else ""
        raise DataError(intro + "; ".join(refused[:5]) + (f"; and {len(refused) - 5} more" if refused[5:] else ""))
    return values


def read_long(
    frame: pd.DataFrame,
    ids: Ids,
    chosen: list[Hashable],
    segment: Segment,
    missing_values: Sequence[Any],
    report: Report,
) -> np.ndarray:
    """The values `[time, channel]` of a table with one row a channel and time; what is not finite is missing."""
    column = frame[LONG_COLUMNS[2]]
    try:
        numbers, sentinel = as_float(column, missing_values)
    except NotNumericError as error:
        raise DataError(f"column {LONG_COLUMNS[2]!r} {error}") from None
    _note_cast(report, LONG_COLUMNS[2], column)
    extra = tuple(label for label in frame.columns if label not in LONG_COLUMNS)
    if extra:
        report.ignored += extra
        report.notices.append(f"{quoted(extra)} is ignored: the long form has only {quoted(LONG_COLUMNS)}")

    place = {label: position for position, label in enumerate(chosen)}
    channel = np.array([place.get(label, -1) for label in ids.names])[ids.codes]
    kept = channel >= 0
    channel, numbers, sentinel = channel[kept], numbers[kept], sentinel[kept]
    values = np.full((len(segment.index), len(chosen)), np.nan)
    values[segment.positions[kept], channel] = numbers

    steps = len(segment.index) - report.rows_inserted
    for position, label in enumerate(chosen):
        cells = channel == position
        known = int(np.count_nonzero(cells & ~np.isnan(numbers)))
        listed = int(np.count_nonzero(cells & sentinel))
        _count(report.sentinels, label, listed)
        _count(report.missing, label, steps - known - listed)
        _count(report.infinite, label, np.count_nonzero(cells & np.isinf(numbers)))
    return values


def _note_cast(report: Report, label: Hashable, column: pd.Series) -> None:
    dtype = name_dtype(column)
    if dtype is not None:
        report.casts[label] = dtype


def _count(counts: dict[Hashable, int], label: Hashable, count: Any) -> None:
    if count:
        counts[label] = int(count)
