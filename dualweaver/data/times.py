"""Reading the time axis: whatever a table calls time becomes a DatetimeIndex, a PeriodIndex or integers."""

from __future__ import annotations

import re
import warnings
from typing import Any, Literal

import numpy as np
import pandas as pd

from dualweaver.errors import DataError

__all__ = ["IndexKind", "kind_of", "looks_like_codes", "looks_like_dates", "quoted", "read_times"]

IndexKind = Literal["datetime", "period", "range"]

# "2020-01", "2020/1/31", "31.01.2020", "Jan 2020", "1 January 2020"; a bare number or a clock time is not a date
_DATE = re.compile(
    r"\d{4}[-/]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}|\d{4}\.\d{1,2}\.\d{1,2}|[A-Za-z]{3,9}\.?[ ,-]+\d{1,4}"
)
_UTC_OFFSET = r"\d:\d\d.*?(Z|[+-]\d\d(?::?\d\d)?)\s*$"


def quoted(labels: Any, most: int = 8) -> str:
    """Labels as a short comma-separated list for a message."""
    labels = list(labels)
    shown = ", ".join(text if len(text := repr(label)) <= 60 else text[:57] + "..." for label in labels[:most])
    return shown + (f" and {len(labels) - most} more" if len(labels) > most else "")


def kind_of(times: pd.Index) -> IndexKind:
    if isinstance(times, pd.DatetimeIndex):
        return "datetime"
    return "period" if isinstance(times, pd.PeriodIndex) else "range"


def looks_like_dates(column: pd.Series) -> bool:
    """Whether a column that is not numeric holds dates, judged by its type or its first few values."""
    if isinstance(column.dtype, pd.PeriodDtype) or column.dtype.kind == "M":
        return True
    if pd.api.types.is_numeric_dtype(column.dtype):
        return False
    present = column[column.notna()].iloc[:5]
    if present.empty:
        return False
    if pd.api.types.infer_dtype(present) in ("date", "datetime", "datetime64", "period"):
        return True
    texts = [str(value) for value in present]
    if not all(_DATE.search(text) for text in texts):
        return False
    try:
        return bool(_parse_quietly(pd.Series(texts)).notna().all())
    except DataError:  # dates, though these few do not tell the day from the month
        return True


def looks_like_codes(column: pd.Series) -> bool:
    """Whether numbers or digits may be dates such as 20200131 or 202012."""
    if not (column.dtype.kind in "iu" or pd.api.types.infer_dtype(column) == "string") or column.isna().any():
        return False
    numbers = pd.to_numeric(column, errors="coerce")
    return bool(numbers.notna().all()) and _date_code(numbers.to_numpy(dtype=np.int64)) is not None


def read_times(values: pd.Series | pd.Index, where: str, notices: list[str]) -> pd.Index:
    """The time of every row `[row]`, in the order of the rows.

    `where` names the column or index in messages; `notices` collects what the user should know. Text in which day and
    month could be swapped is read in the one way that parses, or else in the one that gives the more regular steps.
    """
    if isinstance(values, pd.MultiIndex):
        raise DataError(
            f"{where} has several levels {quoted(values.names)}: turn them into columns with df.reset_index() and "
            "name them with time_column= and entity_column="
        )
    if isinstance(values.dtype, pd.CategoricalDtype):
        values = values.astype(values.dtype.categories.dtype)
    gaps = np.asarray(values.isna())
    if gaps.any():
        raise DataError(
            f"{where} has no time in {gaps.sum()} of {len(values)} rows (the first is row {int(gaps.argmax())}): "
            "drop or complete these rows"
        )
    times = _typed_times(values, where, notices)
    if values.name is not None and kind_of(times) == "range":
        # Continued as numbers, 20200131 or 202012 would run to days and months that do not exist
        code = _date_code(times.to_numpy())
        if code is not None:
            raise DataError(
                f"{where} holds whole numbers that look like dates ({times[0]}): convert them with "
                f"pd.to_datetime(..., format={code!r}) first"
            )
    return times


def _date_code(numbers: np.ndarray) -> str | None:
    for code, digits in (("%Y%m%d", numbers), ("%Y%m", numbers * 100 + 1)):
        year, month, day = digits // 10000, digits // 100 % 100, digits % 100
        if ((year >= 1800) & (year <= 2200) & (month >= 1) & (month <= 12) & (day >= 1) & (day <= 31)).all():
            return code
    return None


def _typed_times(values: pd.Series | pd.Index, where: str, notices: list[str]) -> pd.Index:
    if not isinstance(values.dtype, (np.dtype, pd.PeriodDtype, pd.DatetimeTZDtype)) and values.dtype.kind in "Mui":
        values = pd.Series(values.to_numpy())  # nullable and Arrow types hold no gap any more: back to plain ones
    dtype = values.dtype
    if isinstance(dtype, pd.PeriodDtype):
        return pd.PeriodIndex(values)
    if dtype.kind == "M":
        return pd.DatetimeIndex(values)
    if dtype.kind in "iu":
        return pd.Index(values.to_numpy().astype(np.int64))
    if dtype.kind == "f":
        numbers = values.to_numpy(dtype=np.float64)
        if (numbers == np.floor(numbers)).all() and (np.abs(numbers) < 2**53).all():
            return pd.Index(numbers.astype(np.int64))
    content = pd.api.types.infer_dtype(values, skipna=True)
    if content == "period":
        return pd.PeriodIndex(values)
    if content == "integer":
        return pd.Index(values.to_numpy().astype(np.int64))
    if content in ("string", "date", "datetime", "datetime64", "mixed"):
        return _parse(pd.Series(values.to_numpy()), where, notices)
    raise DataError(
        f"{where} cannot be read as time: it holds {content or dtype} values such as {quoted(values[:1])}; time "
        "stamps, periods or whole numbers are needed"
    )


def _parse(values: pd.Series, where: str, notices: list[str]) -> pd.DatetimeIndex:
    """Time stamps from text, or from a column of Python date objects."""
    if pd.api.types.infer_dtype(values) == "string":
        zones = values.str.extract(_UTC_OFFSET, expand=False)
        aware = zones.notna()
    else:
        zones = values.map(lambda value: None if getattr(value, "tzinfo", None) is None else str(value.tzinfo))
        aware = zones.notna()
    offsets = zones[aware].unique()
    if aware.any() and not aware.all():
        odd = int((~aware).to_numpy().argmax())
        raise DataError(
            f"{where} mixes stamps with and without a time zone (without: {quoted([values.iloc[odd]])} in row {odd}): "
            "give all of them a zone, or none"
        )
    coded = pd.api.types.infer_dtype(values) == "string" and not values.str.contains(r"\D").any()
    if coded and not values.str.len().isin([4, 8, 14]).all():  # a year, a day, a second; "202001" could be anything
        raise DataError(
            f"{where} holds dates written as {quoted(values.iloc[:1])}, which can be read in several ways: convert "
            "them with pd.to_datetime(..., format=...) first"
        )
    times = _parse_quietly(values, utc=len(offsets) > 1)
    bad = times.isna()
    if bad.any():
        row = int(bad.to_numpy().argmax())
        raise DataError(
            f"{where} holds {quoted([values.iloc[row]])} in row {row}, which cannot be read as a time stamp "
            f"({bad.sum()} of {len(values)} rows): correct it, or name the column of the time with time_column="
        )
    if len(offsets) > 1 and pd.Timedelta(times.sort_values().diff().median()) > pd.Timedelta(hours=20):
        raise DataError(
            f"{where} holds days with the UTC offsets {quoted(offsets)}, which do not tell its time zone: convert it "
            "with pd.to_datetime(..., utc=True) and .dt.tz_convert first"
        )
    if len(offsets) > 1:
        notices.append(f"{where} mixes the UTC offsets {quoted(offsets)}: read as UTC")
    return pd.DatetimeIndex(times)


def _parse_quietly(values: pd.Series, utc: bool = False) -> pd.Series:
    """Time stamps, NaT where a value is not one. ISO 8601 first: all other formats may mean day or month first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pandas warns where it falls back to guessing value by value
        iso = _to_datetime(values, utc=utc, format="ISO8601")
        if not iso.isna().any():
            return iso
        readings = [_to_datetime(values, utc=utc, dayfirst=first) for first in (False, True)]
    readings.sort(key=lambda reading: (reading.isna().sum(), _disorder(reading)))
    best, other = readings
    if not other.isna().any() and not best.equals(other) and _disorder(best) == _disorder(other):
        raise DataError(
            f"dates such as {quoted(values.iloc[:1])} read both as day/month and as month/day: convert the column "
            "with pd.to_datetime(..., dayfirst=True or False) first"
        )
    return best if best.isna().sum() <= iso.isna().sum() else iso


def _to_datetime(values: pd.Series, **how: Any) -> pd.Series:
    try:
        times = pd.to_datetime(values, errors="coerce", **how)
    except (ValueError, TypeError, OverflowError):  # some mixtures are beyond "coerce"
        times = pd.Series(pd.NaT, index=values.index)
    return times if times.dtype.kind == "M" else pd.Series(pd.NaT, index=values.index)


def _disorder(times: pd.Series) -> tuple[bool, int]:
    """How unlike a time axis a reading is: first whether it goes back, then how many different steps it has."""
    return (not times.is_monotonic_increasing, times.diff().nunique())
