"""Frames in and out: `read_table` turns a frame into regular grids of numbers, `write_table` writes forecasts like it.

table = read_table(df)  # one block of values [time, channel] an entity
index = future_index(table.layout, table.blocks[0].index, horizon=24)
write_table(table.layout, table.columns, [(None, index, {"mean": forecast, 0.9: upper})])
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from dualweaver.data.axis import build_axis, number_keys, split_rows
from dualweaver.data.layout import LONG_COLUMNS, Layout, Roles, find_roles
from dualweaver.data.missing import Report, check_policy, fill, refuse_missing
from dualweaver.data.times import kind_of, quoted, read_times
from dualweaver.data.values import choose, read_ids, read_long, read_wide
from dualweaver.data.writing import MODEL_NAME, future_index, write_table
from dualweaver.errors import DataError
from dualweaver.notices import notify

__all__ = ["MODEL_NAME", "Block", "Layout", "Report", "Table", "future_index", "read_table", "write_table"]


@dataclass(frozen=True)
class Block:
    """One entity's regular grid."""

    entity: Hashable | None
    index: pd.Index  # complete and ascending
    values: np.ndarray  # float64 [time, channel], finite
    observed: np.ndarray  # bool [time, channel], False where the value was filled

    @property
    def name(self) -> str:
        """What messages call it."""
        return "the frame" if self.entity is None else f"entity {self.entity!r}"


@dataclass(frozen=True)
class Table:
    """A frame as a model needs it: `columns` name the channels of every block."""

    layout: Layout
    columns: tuple[Hashable, ...]
    blocks: tuple[Block, ...]
    report: Report


def read_table(
    df: Any,
    *,
    time_column: Hashable | None = None,
    entity_column: Hashable | None = None,
    freq: Any = None,
    columns: Sequence[Hashable] | None = None,
    missing: str = "interpolate",
    missing_values: Any = (),
    layout: Layout | None = None,
) -> Table:
    """Read a frame into regular grids of finite numbers; the frame itself is never changed.

    The time is the index, or `time_column`, or the one column of dates where the index only counts rows. A frame with
    the columns `unique_id`, `ds` and `y` is in the long form: every id is a channel. With `entity_column` every entity
    is a block of its own; where such a frame has no time at all, the rows of each entity are counted from zero.

    Args:
        freq: a pandas alias, or a step for an integer index; inferred if left out. If given, any number of missing
            rows is inserted, and stamps off the grid move to the nearest step.
        columns: at predict time, the channels of the fitted table: columns are matched by name.
        missing: "interpolate", "ffill" or "raise"; for NaN, infinities, `missing_values` and inserted rows alike.
        missing_values: numbers or text that stand for a missing value, such as [-9999].
        layout: at predict time, that of the fitted table, which knows the frequency.
    """
    check_policy(missing)
    listed = (
        [missing_values] if isinstance(missing_values, str) or np.isscalar(missing_values) else list(missing_values)
    )
    frame = _as_frame(df)
    if layout is not None:
        if time_column is None and layout.time_column in frame.columns:
            time_column = layout.time_column
        entity_column = layout.entity_column if entity_column is None else entity_column
    if time_column is not None and time_column == frame.index.name and time_column not in frame.columns:
        time_column = None
    roles = find_roles(frame, time_column, entity_column)
    report = Report(rows=len(frame))

    times, where = _read_time(frame, roles, report)
    if layout is not None and kind_of(times) != layout.index_kind:
        needed = "time stamps" if layout.index_kind == "datetime" else f"a {layout.index_kind} index"
        hint = f", such as in the column {layout.time_column!r}" if layout.time_column is not None else ""
        raise DataError(
            f"{where} holds {times.dtype} values, but the model was fitted on {needed}: give it {needed}{hint}"
        )
    long = read_ids(frame) if roles.form == "long" else None
    names = list(roles.channels) if long is None else long.names
    chosen = choose(names, columns, report)
    keys = None if roles.entity_column is None else frame[roles.entity_column]
    groups = split_rows(keys, roles.entity_column)
    step, segments = build_axis(times, groups, long, freq, layout, where, report)
    if long is None:
        values = read_wide(frame, chosen, segments, listed, report)
    else:
        values = [read_long(frame, long, chosen, segments[0], listed, report)]

    blocks = []
    for segment, grid in zip(segments, values, strict=True):
        observed = np.isfinite(grid)
        empty = [label for label, known in zip(chosen, observed.any(axis=0), strict=True) if not known]
        if empty:
            whose = "" if segment.entity is None else f" of entity {segment.entity!r}"
            raise DataError(
                f"{quoted(empty)}{whose} has no value at all: drop the column, or check where it comes from"
            )
        blocks.append(Block(segment.entity, segment.index, grid, observed))
    if missing == "raise":
        refuse_missing(report)
    steps = sum(len(block.index) for block in blocks) - report.rows_inserted
    known = sum(block.observed.sum(axis=0) for block in blocks) / steps
    sparse = [label for label, share in zip(chosen, known, strict=True) if share < 0.5]
    for block in blocks:
        fill(block.values, block.observed, missing)
    _announce(report, where, step, missing, sparse)
    written = Layout(
        form=roles.form,
        columns=tuple(frame.columns.tolist()),
        index_kind=kind_of(times),
        freq=step,
        freq_given=freq is not None or (layout is not None and layout.freq_given),
        time_column=roles.time_column,
        entity_column=roles.entity_column,
        id_column=LONG_COLUMNS[0] if long is not None else None,
        value_column=LONG_COLUMNS[2] if long is not None else None,
        tz=str(times.tz) if isinstance(times, pd.DatetimeIndex) and times.tz is not None else None,
        index_name=frame.index.name if roles.time_column is None else None,
        column_names=tuple(frame.columns.names),
    )
    return Table(written, tuple(chosen), tuple(blocks), report)


def _as_frame(df: Any) -> pd.DataFrame:
    if isinstance(df, pd.Series):
        df = df.to_frame()
    elif not isinstance(df, pd.DataFrame) and hasattr(df, "to_pandas"):
        try:
            df = df.to_pandas()
        except ImportError as error:
            raise DataError(f"this {type(df).__name__} cannot be turned into a pandas frame: {error}") from None
    if not isinstance(df, pd.DataFrame):
        raise DataError(f"a pandas DataFrame is needed, not {type(df).__name__}: wrap the values in pd.DataFrame(...)")
    if len(df) == 0:
        raise DataError("the table has no rows: give it at least as many as the context is long")
    if df.index.name == LONG_COLUMNS[0] and set(LONG_COLUMNS[1:]) <= set(df.columns):
        df = df.reset_index()  # how Nixtla's older libraries wrote the long form
    return df


def _read_time(frame: pd.DataFrame, roles: Roles, report: Report) -> tuple[pd.Index, str]:
    """The time of every row, and what to call it in messages."""
    if roles.time_column is not None:
        where = f"column {roles.time_column!r}"
        return read_times(frame[roles.time_column], where, report.notices).rename(roles.time_column), where
    if roles.entity_column is not None and frame.index.equals(pd.RangeIndex(len(frame))):
        codes = pd.Series(number_keys(frame[roles.entity_column], roles.entity_column)[0])
        return pd.Index(codes.groupby(codes).cumcount().to_numpy()), "the row number"
    where = "the index" if frame.index.name is None else f"the index {frame.index.name!r}"
    return read_times(frame.index, where, report.notices).rename(frame.index.name), where


def _announce(report: Report, where: str, freq: object, filled: str, sparse: list[Hashable]) -> None:
    """Put in words what was repaired and could surprise; plain missing values are only counted."""
    say = report.notices.append
    if report.sorted:
        say(f"the rows were not in the order of {where}: sorted by time")
    if report.stamps_moved:
        say(f"{report.stamps_moved} stamps of {where} moved to the nearest step of {freq!r}")
    if report.rows_inserted:
        say(f"{report.rows_inserted} steps of {freq!r} in {where} had no row: inserted, and filled by {filled!r}")
    if report.infinite:
        say(f"infinite values in {quoted(report.infinite)}: filled like missing ones, by {filled!r}")
    if sparse:
        say(f"more than half of {quoted(sparse)} is missing: filled by {filled!r}")
    for notice in report.notices:
        notify(notice)
