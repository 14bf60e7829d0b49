"""Frequencies: recognising how far apart the rows of a table are, and reading what a user wrote as `freq=`.

Steps of less than a day run on the absolute clock: an hour is an hour, also where a time zone changes. Whole days and
everything longer run on the wall clock: a day is a date, also where it has 23 hours.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from pandas.tseries.frequencies import to_offset

from dualweaver.data.times import kind_of
from dualweaver.errors import DataError, SettingError

__all__ = [
    "Freq",
    "exact_freq",
    "fixed_step",
    "from_clock",
    "infer_freq",
    "modal",
    "normalise_freq",
    "on_wall_clock",
    "to_clock",
]

Freq = str | int  # a pandas alias for time stamps and periods, a step for integers

DAY = pd.Timedelta(days=1)
_MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
_WEEKDAYS = ("MON", "TUE", "WED", "THU", "FRI", "SAT", "SUN")
_COMMON = ("s", "5s", "10s", "15s", "30s", "min", "5min", "10min", "15min", "30min", "h", "2h", "3h", "6h", "12h")


def fixed_step(alias: str) -> pd.Timedelta | None:
    """The length of a step, or None where it depends on the calendar."""
    offset = to_offset(alias)
    if isinstance(offset, pd.offsets.Day):  # a Tick in pandas 2 only
        return pd.Timedelta(days=offset.n)
    return pd.Timedelta(offset) if isinstance(offset, pd.offsets.Tick) else None


def on_wall_clock(alias: str) -> bool:
    offset = to_offset(alias)
    return isinstance(offset, pd.offsets.Day) or not isinstance(offset, pd.offsets.Tick)


def to_clock(times: pd.DatetimeIndex, wall: bool) -> pd.DatetimeIndex:
    """Stamps without a zone, on the wall clock or the absolute one, where regular steps are plain arithmetic."""
    if times.tz is None:
        return times
    if not wall:
        return times.tz_convert(None)
    clock = times.tz_localize(None)
    midnight = clock.normalize()
    usual, _ = modal((clock - midnight).asi8)
    # Some zones skip midnight once a year; pandas writes that day's stamp an hour later, which is no irregularity
    snapped = midnight + pd.Timedelta(usual, unit=clock.unit)
    odd = np.flatnonzero(snapped != clock)
    moved = odd[from_clock(snapped[odd], times.tz, wall=True) == times[odd]]
    if not moved.size:
        return clock
    stamps = clock.to_numpy().copy()
    stamps[moved] = snapped[moved].to_numpy()
    return pd.DatetimeIndex(stamps)


def from_clock(clock: pd.DatetimeIndex, tz: Any, wall: bool) -> pd.DatetimeIndex:
    """Undo `to_clock`. A wall time that a zone skips moves forward; one that comes twice is the first of them."""
    if tz is None:
        return clock
    if not wall:
        return clock.tz_localize("UTC").tz_convert(tz)
    return clock.tz_localize(tz, ambiguous=np.ones(len(clock), dtype=bool), nonexistent="shift_forward")


def modal(steps: np.ndarray) -> tuple[int, float]:
    """The most frequent value and its share."""
    values, counts = np.unique(steps, return_counts=True)
    return int(values[counts.argmax()]), float(counts.max() / counts.sum())


def normalise_freq(freq: Any, times: pd.Index, where: str) -> Freq:
    """A user's `freq=`, checked against the kind of the time axis."""
    kind = kind_of(times)
    if kind == "range":
        if isinstance(freq, (int, np.integer)) and not isinstance(freq, bool) and freq > 0:
            return int(freq)
        raise SettingError(
            f"freq={freq!r} does not suit {where}, which holds whole numbers: pass a positive step such as freq=1, or "
            "name the column with the time stamps with time_column="
        )
    if isinstance(times, pd.PeriodIndex):
        try:
            same = pd.PeriodDtype(freq).freq == times.freq
        except (ValueError, TypeError):
            same = False
        if not same:
            raise SettingError(
                f"freq={freq!r} contradicts {where}, whose periods have the frequency {times.freqstr!r}: leave freq= "
                "out, or convert the periods with .asfreq"
            )
        return str(times.freqstr)
    try:
        offset = to_offset(freq)
        if offset is None or isinstance(freq, int):
            raise ValueError("a frequency is text such as 'h' or '15min'")
    except (ValueError, TypeError):
        raise SettingError(
            f"freq={freq!r} is not a frequency that pandas knows: use for example 'h', '15min', 'D', 'B', 'W-SUN', "
            "'MS' or 'ME'"
        ) from None
    if offset.n <= 0 or not _portable(offset):
        raise SettingError(
            f"freq={freq!r} is not supported: use a standard alias that goes forward in time, such as 'B'"
        )
    return str(offset.freqstr)


def infer_freq(times: pd.Index, where: str) -> Freq:
    """How far apart the rows are: `times` ascending and without repeats; a few may be missing.

    Says what is wrong with irregular stamps; whether too many are missing is for `lay_out` to say.
    """
    if isinstance(times, pd.PeriodIndex):
        return str(times.freqstr)
    if isinstance(times, pd.DatetimeIndex):
        return _infer_alias(times, where)
    return modal(np.diff(times.to_numpy()))[0] if len(times) > 1 else 1


def _infer_alias(times: pd.DatetimeIndex, where: str) -> str:
    if times.freq is not None and times.freq.n > 0 and _portable(times.freq):
        return str(times.freq.freqstr)
    if len(times) < 3:
        raise DataError(f"{where} has {len(times)} row(s), too few to see how far apart they are: pass freq=")
    clock = to_clock(times, wall=True)
    if pd.Timedelta(modal(np.diff(clock.asi8))[0], unit=clock.unit) % DAY:
        clock = to_clock(times, wall=False)
    elif times.tz is not None:
        # Days counted in one zone and shown in another are 24 hours long, whatever the wall clock says
        steps = np.unique(np.diff(times.asi8))
        if len(steps) == 1 and len(np.unique(np.diff(clock.asi8))) > 1:
            return f"{pd.Timedelta(steps[0], unit=times.unit) // pd.Timedelta(hours=1)}h"
    exact = exact_freq(clock)
    if exact is not None:
        return exact
    step = pd.Timedelta(modal(np.diff(clock.asi8))[0], unit=clock.unit)
    for alias in _calendar_guesses(clock, step):
        grid = pd.date_range(clock[0], clock[-1], freq=alias, unit=clock.unit)
        if clock.isin(grid).all():
            return alias
    off = np.flatnonzero((clock - clock[0]) % step != pd.Timedelta(0))
    if not off.size:
        return _alias(step, clock)
    raise DataError(_irregular(times, off, step, where))


def exact_freq(clock: pd.DatetimeIndex) -> str | None:
    """The frequency of stamps without a zone, none of which is missing; None where pandas sees none."""
    if len(clock) < 3:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whether the answer is text or an offset depends on the version of pandas
        offset = to_offset(pd.infer_freq(clock))
    if offset is None or not _portable(offset):
        return None
    # pandas tells months by their days alone; the time of day must agree too
    grid = pd.date_range(clock[0], clock[-1], freq=offset, unit=clock.unit)
    return str(offset.freqstr) if np.array_equal(grid, clock) else None


def _calendar_guesses(clock: pd.DatetimeIndex, step: pd.Timedelta) -> Iterator[str]:
    """Frequencies without a fixed length that rows of this step may have, the more usual ones first."""
    if step == DAY and (clock.day_of_week < 5).all() and (np.diff(clock.day_of_week) < 0).any():
        yield "B"
    months = round(step.days / 30.44)
    if months and abs(step.days - 30.44 * months) < 3:
        month = _MONTHS[clock[0].month - 1]
        if months % 12 == 0:
            rules = [f"{months // 12}{rule}-{month}" for rule in ("YS", "YE", "BYS", "BYE")]
        elif months % 3 == 0:
            rules = [f"{months // 3}{rule}-{month}" for rule in ("QS", "QE", "BQS", "BQE")]
        else:
            rules = [f"{months}{rule}" for rule in ("MS", "ME", "BMS", "BME")]
        yield from (str(to_offset(rule).freqstr) for rule in rules)


def _alias(step: pd.Timedelta, clock: pd.DatetimeIndex) -> str:
    if step % (7 * DAY) == pd.Timedelta(0):
        weeks = step // (7 * DAY)
        return f"{weeks if weeks > 1 else ''}W-{_WEEKDAYS[clock[0].day_of_week]}"
    if step % DAY == pd.Timedelta(0):
        return f"{step.days if step.days > 1 else ''}D"
    return str(to_offset(step).freqstr)


def _irregular(times: pd.DatetimeIndex, off: np.ndarray, step: pd.Timedelta, where: str) -> str:
    typical = pd.Timedelta(float(np.median(np.diff(times.asi8))), unit=times.unit)
    message = (
        f"{where} is irregular: typically {typical.round('ms')} from row to row, but {len(off)} of {len(times)} stamps "
        f"are off a regular grid, the first at {times[off[0]]}: "
    )
    if 28 <= step.days <= 31:
        return message + "turn the stamps into months with .to_period('M')"
    lengths = np.array([(fixed_step(alias) or DAY) / typical for alias in _COMMON])
    nearest = "D" if typical > pd.Timedelta(hours=18) else _COMMON[int(np.abs(np.log(lengths)).argmin())]
    return message + (
        f"pass freq={nearest!r} to move each stamp to the nearest step, or use df.resample({nearest!r}).mean()"
    )


def _portable(offset: Any) -> bool:
    """Whether the alias says all there is to the offset, so that it can be stored as text."""
    try:
        return bool(to_offset(offset.freqstr) == offset) and offset.freqstr not in ("C", "CBMS", "CBME")
    except ValueError:
        return False
