"""Casting: any column that means numbers becomes float64, and one that does not is named."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from dualweaver.data.times import looks_like_dates, quoted

__all__ = ["NotNumericError", "as_float", "name_dtype"]

_BLANK = frozenset({"", "na", "n/a", "nan", "null", "none", "<na>"})


class NotNumericError(Exception):
    """Says what a column holds instead of numbers; the caller adds its name."""


def name_dtype(column: pd.Series) -> str | None:
    """The type a column had to be cast from, or None where it held plain numbers already."""
    dtype = column.dtype
    return None if isinstance(dtype, np.dtype) and dtype.kind in "fiu" else str(dtype)


def as_float(column: pd.Series, missing_values: Sequence[Any] = ()) -> tuple[np.ndarray, np.ndarray]:
    """A column's numbers as float64 `[row]`, NaN where missing, and a mask `[row]` of those in `missing_values`.

    The array may share memory with the caller's frame: it is read, never written.
    """
    dtype = column.dtype
    if isinstance(dtype, pd.CategoricalDtype):
        # Casting the few categories and looking them up costs nothing, and unused ones must not be held against it
        column = column.cat.remove_unused_categories()
        numbers, hit = as_float(pd.Series(column.cat.categories), missing_values)
        codes = column.cat.codes.to_numpy()
        return np.append(numbers, np.nan)[codes], np.append(hit, False)[codes]
    if dtype.kind in "Mm" or isinstance(dtype, (pd.PeriodDtype, pd.IntervalDtype)) or dtype.kind == "c":
        example = quoted([str(value) for value in column[column.notna()].iloc[:1]])
        advice = "pass it as time_column= or drop it" if dtype.kind == "M" else "turn it into real numbers or drop it"
        raise NotNumericError(f"holds {dtype} values such as {example}: {advice}")
    if pd.api.types.is_numeric_dtype(dtype):
        return _mark(column.to_numpy(dtype=np.float64, na_value=np.nan), column, missing_values)
    return _from_objects(column, missing_values)


def _mark(numbers: np.ndarray, column: pd.Series, missing_values: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Set the sentinels of a numeric column to NaN."""
    wanted = [float(value) for value in missing_values if _is_number(value)]
    if column.dtype == np.float32:  # -99.9 was rounded when the column was made, so round what it is compared with
        wanted = [float(np.float32(value)) for value in wanted]
    hit = np.isin(numbers, wanted) if wanted else np.zeros(len(numbers), dtype=bool)
    return (np.where(hit, np.nan, numbers) if hit.any() else numbers), hit


def _from_objects(column: pd.Series, missing_values: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Text, Decimal, and mixtures."""
    known = column.notna().to_numpy()
    texts = column.map(str).str.strip()
    blank = known & texts.str.lower().isin(_BLANK).to_numpy()
    sentinel = known & texts.isin([str(value).strip() for value in missing_values]).to_numpy()
    cells = column.astype(object).where(known & ~blank & ~sentinel, np.nan).to_numpy()
    try:
        numbers = cells.astype(np.float64)
    except (ValueError, TypeError, OverflowError):
        bad = [row for row, cell in enumerate(cells) if not _floats(cell)]
        advice = "drop it or encode it as numbers"
        if looks_like_dates(column):
            advice = "if it is the time, pass it as time_column=, else drop it"
        raise NotNumericError(
            f"holds {quoted([cells[bad[0]]])} in row {bad[0]}, which cannot be read as a number ({len(bad)} of "
            f"{len(cells)} rows): {advice}"
        ) from None
    numbers, more = _mark(numbers, column, missing_values)
    return numbers, sentinel | more


def _floats(cell: Any) -> bool:
    try:
        float(cell)
    except (ValueError, TypeError, OverflowError):
        return False
    return True


def _is_number(value: Hashable) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
