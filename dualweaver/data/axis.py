"""One time axis for a whole table: split by entity, put in order, checked for repeats, laid on a common grid."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from dualweaver.data.frequency import Freq, fixed_step, infer_freq, modal, normalise_freq, on_wall_clock, to_clock
from dualweaver.data.grid import lay_out
from dualweaver.data.layout import Layout
from dualweaver.data.missing import Report
from dualweaver.data.times import quoted
from dualweaver.errors import DataError

__all__ = ["Ids", "Segment", "build_axis", "number_keys", "split_rows"]

Rows = np.ndarray | slice


@dataclass(frozen=True)
class Ids:
    """Long form: the number `[row]` of the channel of each row, and the `names` of the channels."""

    codes: np.ndarray
    names: list[Hashable]


@dataclass(frozen=True)
class Segment:
    """One entity's rows of the frame, and the position `[row]` of each in its complete grid `index`."""

    entity: Hashable | None
    rows: Rows
    positions: np.ndarray
    index: pd.Index


def number_keys(keys: pd.Series, label: Hashable) -> tuple[np.ndarray, list[Hashable]]:
    """The number `[row]` of each key, and the keys in the order in which they first appear."""
    try:
        codes, found = pd.factorize(keys)
    except TypeError:
        raise DataError(f"column {label!r} holds lists or the like, which cannot be names: turn it into text") from None
    if (codes < 0).any():
        raise DataError(f"column {label!r} is empty in {(codes < 0).sum()} rows: complete or drop them")
    return codes, found.tolist()


def split_rows(keys: pd.Series | None, label: Hashable) -> list[tuple[Hashable | None, Rows]]:
    """The rows of each entity in their order, entities as they first appear."""
    if keys is None:
        return [(None, slice(None))]
    codes, entities = number_keys(keys, label)
    order = np.argsort(codes, kind="stable")
    return list(zip(entities, np.split(order, np.cumsum(np.bincount(codes))[:-1]), strict=True))


def build_axis(
    times: pd.Index,
    groups: list[tuple[Hashable | None, Rows]],
    ids: Ids | None,
    freq: Freq | None,
    fitted: Layout | None,
    where: str,
    report: Report,
) -> tuple[Freq, list[Segment]]:
    """Lay every entity's rows on a grid of one frequency.

    `times` `[row]` is the time of each row; in the long form it may repeat between channels. `fitted` is the layout of
    the table that the model was fitted on.
    """
    ordered = [(entity, *_in_order(times, rows, ids, _at(where, entity), report)) for entity, rows in groups]
    any_gaps = may_move = True
    if freq is not None:
        freq = normalise_freq(freq, times, where)
    elif fitted is not None:
        freq, may_move = fitted.freq, fitted.freq_given
        for entity, _, stamps, _ in ordered:
            _check_fitted(stamps, fitted, _at(where, entity))
    else:
        any_gaps = may_move = False
        entity, _, longest, _ = max(ordered, key=lambda part: len(part[2]))
        freq = infer_freq(longest, _at(where, entity))
    segments = []
    for entity, rows, stamps, ranks in ordered:
        grid = lay_out(stamps, freq, _at(where, entity), any_gaps, may_move)
        report.rows_inserted += grid.inserted
        report.stamps_moved += grid.moved
        positions = grid.positions if ranks is None else grid.positions[ranks]
        segments.append(Segment(entity, rows, positions, grid.index.rename(times.name)))
    return freq, segments


def _at(where: str, entity: Hashable | None) -> str:
    return where if entity is None else f"{where} of entity {entity!r}"


def _numbers(times: pd.Index) -> np.ndarray:
    return times.asi8 if isinstance(times, (pd.DatetimeIndex, pd.PeriodIndex)) else times.to_numpy()


def _in_order(
    times: pd.Index, rows: Rows, ids: Ids | None, where: str, report: Report
) -> tuple[Rows, pd.Index, np.ndarray | None]:
    """Rows ascending in time, their stamps without repeats, and in the long form the rank of each row's stamp."""
    times = times[rows]
    numbers = _numbers(times)
    if ids is not None:
        by_id = np.argsort(ids.codes, kind="stable")
        falls = (np.diff(numbers[by_id]) < 0) & (np.diff(ids.codes[by_id]) == 0)
        report.sorted |= bool(falls.any())
        stamps = times.unique().sort_values()
        ranks = stamps.get_indexer(times)
        cells = pd.Series(ranks * len(ids.names) + ids.codes)
        if cells.duplicated().any():
            first = int(cells.duplicated().to_numpy().argmax())
            where = f"{where} of id {ids.names[ids.codes[first]]!r}"
            _refuse_repeats(times[first], int((cells == cells[first]).sum()), int(cells.duplicated().sum()), where)
        return rows, stamps, ranks
    if not times.is_monotonic_increasing:
        report.sorted = True
        order = np.argsort(numbers, kind="stable")
        rows = order if isinstance(rows, slice) else rows[order]
        times, numbers = times[order], numbers[order]
    repeats = np.flatnonzero(np.diff(numbers) == 0)
    if repeats.size:
        first = int(repeats[0])
        _refuse_repeats(times[first], int((numbers == numbers[first]).sum()), len(repeats), where)
    return rows, times, None


def _refuse_repeats(stamp: object, count: int, surplus: int, where: str) -> None:
    raise DataError(
        f"{where} has the time stamp {stamp} {count} times ({surplus} surplus row(s) in all): drop or combine them, or "
        "pass entity_column= if the rows belong to several systems"
    )


def _check_fitted(stamps: pd.Index, fitted: Layout, where: str) -> None:
    """Refuse a table whose rows are plainly not as far apart as those that the model was fitted on."""
    freq = fitted.freq
    if isinstance(stamps, pd.PeriodIndex):
        apart: object = stamps.freqstr
        wrong = apart != freq
    elif len(stamps) < 3:
        return
    elif isinstance(stamps, pd.DatetimeIndex):
        clock = to_clock(stamps, on_wall_clock(str(freq)))
        steps = np.diff(clock.asi8)
        # Of rows with many gaps the most frequent step tells, of stamps that scatter the median
        usual, middle = (pd.Timedelta(int(step), unit=clock.unit) for step in (modal(steps)[0], np.median(steps)))
        nominal = fixed_step(str(freq)) or pd.Timedelta(
            np.diff(pd.date_range(clock[0], periods=9, freq=str(freq))).mean()
        )
        room = 0.35 if fitted.freq_given else 0.1  # for the lengths of months, and for stamps that scatter
        wrong = not any(abs(step / nominal - 1) < room for step in (usual, middle)) and freq != "B"
        apart = middle
    else:
        apart = modal(np.diff(stamps.to_numpy()))[0]
        wrong = apart != freq
    if wrong:
        raise DataError(
            f"{where} steps by {quoted([str(apart)])}, but the model was fitted on {freq!r}: bring the table to that "
            "frequency, or fit the model on this one"
        )
