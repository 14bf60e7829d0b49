"""The regular grid: laying time stamps on it, and continuing it into the future."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pandas as pd

from dualweaver.data.frequency import Freq, exact_freq, fixed_step, from_clock, modal, on_wall_clock, to_clock
from dualweaver.errors import DataError, SettingError

__all__ = ["Grid", "continue_index", "lay_out"]

MOST_MISSING = 0.2  # of the steps, where the frequency was inferred: beyond, it is no longer plain what it is
MOST_INSERTED = 0.95  # of the steps, where the user gave it: beyond, freq= must be a slip, and memory is at stake


@dataclass(frozen=True)
class Grid:
    """A complete ascending `index`, the `positions` `[row]` of the given stamps in it, and how many were `moved`."""

    index: pd.Index
    positions: np.ndarray
    moved: int = 0

    @property
    def inserted(self) -> int:
        return len(self.index) - len(self.positions)


def lay_out(times: pd.Index, freq: Freq, where: str, any_gaps: bool, may_move: bool) -> Grid:
    """Lay ascending stamps without repeats on the grid of `freq`.

    An inferred frequency must explain nearly all that is there. One that is known allows `any_gaps`, and one that the
    user chose moves stamps off the grid to the nearest step (`may_move`).
    """
    if isinstance(times, pd.DatetimeIndex):
        return _lay_out_stamps(times, str(freq), where, any_gaps, may_move)
    if isinstance(times, pd.PeriodIndex):
        numbers, step = times.asi8, cast(Any, times.freq).n
    else:
        numbers, step = times.to_numpy(), int(freq)
    positions, rest = np.divmod(numbers - numbers[0], step)
    if rest.any():
        raise DataError(
            f"{where} is irregular: most rows are {freq} apart, but {np.count_nonzero(rest)} of {len(times)} are off "
            f"that grid, the first at {times[int((rest != 0).argmax())]}: correct them, or pass another freq="
        )
    _check_size(times, positions, freq, where, any_gaps)
    count = int(positions[-1]) + 1
    if isinstance(times, pd.PeriodIndex):
        return Grid(pd.period_range(times[0], periods=count, freq=times.freqstr), positions)
    return Grid(pd.RangeIndex(int(numbers[0]), int(numbers[0]) + count * step, step), positions)


def _lay_out_stamps(times: pd.DatetimeIndex, freq: str, where: str, any_gaps: bool, may_move: bool) -> Grid:
    wall = on_wall_clock(freq)
    clock = to_clock(times, wall)
    step = fixed_step(freq)
    start = clock[0]
    if step is None:
        grid = pd.date_range(start, clock[-1], freq=freq, unit=clock.unit)
        positions = grid.get_indexer(clock)
        off = positions < 0
        if off.any():
            seen = exact_freq(clock)
            raise DataError(
                f"{where} does not fall on the steps of freq={freq!r}: {off.sum()} of {len(times)} stamps are off, the "
                f"first is {times[int(off.argmax())]}: "
                + (
                    f"pass freq={seen!r}, which fits"
                    if seen
                    else "correct them, or turn them into periods with .to_period"
                )
            )
        _check_size(times, positions, freq, where, any_gaps)
        return Grid(from_clock(grid, times.tz, wall), positions)
    positions = np.asarray((clock - start) // step)
    off = np.asarray((clock - start) % step != pd.Timedelta(0))
    if off.any():
        if not may_move:
            raise DataError(
                f"{where} does not fall on a grid of {freq!r}: {off.sum()} of {len(times)} stamps are off, the first "
                f"is {times[int(off.argmax())]}: pass freq={freq!r} to move each to the nearest step, or resample"
            )
        start, positions = _snap(clock, step, freq, where)
    _check_size(times, positions, freq, where, any_gaps)
    grid = pd.date_range(start, periods=int(positions[-1]) + 1, freq=freq, unit=clock.unit)
    moved = int(np.count_nonzero(grid[positions] != clock))
    return Grid(from_clock(grid, times.tz, wall), positions, moved)


def _snap(clock: pd.DatetimeIndex, step: pd.Timedelta, freq: str, where: str) -> tuple[pd.Timestamp, np.ndarray]:
    """The first step and the step number of stamps that scatter around a grid, whose phase is that of most of them."""
    base = clock[0].normalize()
    phases = (clock - base) % step
    phase, share = modal(phases.asi8)
    origin = base + pd.Timedelta(phase, unit=phases.unit) if share >= 0.5 else base
    if step >= pd.Timedelta(days=1):  # a reading at any hour belongs to its day
        positions = np.asarray((clock - origin) // step)
    else:
        positions = np.asarray((clock - origin + step / 2) // step)
    twice = np.flatnonzero(np.diff(positions) == 0)
    if twice.size:
        raise DataError(
            f"{where} has {twice.size} steps of {freq!r} with more than one row, the first near {clock[twice[0]]}: "
            f"average them with df.resample({freq!r}).mean(), or pass a shorter freq="
        )
    return origin + int(positions[0]) * step, positions - positions[0]


def _check_size(times: pd.Index, positions: np.ndarray, freq: Freq, where: str, any_gaps: bool) -> None:
    """Refuse a grid that is mostly gaps, before anything of its size is made."""
    steps = int(positions[-1]) + 1
    missing = steps - len(times)
    if any_gaps and missing > 100 and missing > MOST_INSERTED * steps:
        raise SettingError(
            f"freq={freq!r} would make {steps} steps from {len(times)} rows of {where}, nearly all of them without a "
            "row: pass a longer one"
        )
    if any_gaps or missing <= MOST_MISSING * steps:
        return
    jumps = np.flatnonzero(np.diff(positions) > 1)
    lengths = np.diff(positions)[jumps] - 1
    raise DataError(
        f"{where} has gaps: of {steps} steps of {freq!r} between {times[0]} and {times[-1]}, {missing} have no row "
        f"({len(jumps)} gaps, typically {int(np.median(lengths))} steps long, the first after {times[jumps[0]]}): pass "
        f"freq={freq!r} to insert and fill them, or df.reset_index(drop=True) to count rows instead of time"
    )


def continue_index(index: pd.Index, freq: Freq, horizon: int) -> pd.Index:
    """The next `horizon` steps after a grid made by `lay_out`: same kind, zone, unit and name."""
    if horizon < 1:
        raise SettingError(f"horizon must be at least 1, not {horizon}")
    last = index[-1]
    if isinstance(index, pd.PeriodIndex):
        return pd.period_range(last, periods=horizon + 1, freq=index.freqstr, name=index.name)[1:]
    if not isinstance(index, pd.DatetimeIndex):
        step = int(freq)
        return pd.RangeIndex(int(last) + step, int(last) + (horizon + 1) * step, step, name=index.name)
    assert isinstance(freq, str)
    wall = on_wall_clock(freq)
    start = to_clock(index[-9:], wall)[-1]  # several, so that a stamp moved by a zone change is seen to be odd
    try:
        clock = pd.date_range(start, periods=horizon + 1, freq=freq, unit=index.unit, name=index.name)[1:]
        return from_clock(clock, index.tz, wall)
    except (pd.errors.OutOfBoundsDatetime, OverflowError):
        raise SettingError(
            f"horizon={horizon} steps of {freq!r} after {last} go beyond the last date that pandas can represent"
        ) from None
