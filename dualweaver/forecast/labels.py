"""Labels, settings, indices and small tables as plain JSON and whole numbers, and back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from dualweaver.errors import CheckpointError

__all__ = ["from_json", "index_from_ticks", "index_kind", "table_to_json", "ticks_of", "to_json"]


def to_json(name: str, value: Any) -> Any:
    """A setting or label in JSON types; what JSON does not know is kept in an object of one entry."""
    if isinstance(value, pd.Timestamp):
        return {"stamp": value.isoformat(), "zone": None if value.tz is None else str(value.tz)}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, tuple):
        return {"tuple": [to_json(name, part) for part in value]}
    if isinstance(value, list | set | frozenset | range | np.ndarray | pd.Index | pd.Series):
        return [to_json(name, part) for part in value]
    raise CheckpointError(f"{name}={value!r} of type {type(value).__name__} cannot be saved: use text or numbers")


def from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [from_json(part) for part in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(from_json(part) for part in value["tuple"])
    if "float" in value:
        return float(value["float"])
    stamp = pd.Timestamp(value["stamp"])
    return stamp if value["zone"] is None else stamp.tz_convert(value["zone"])


def table_to_json(table: pd.DataFrame) -> dict[str, list[Any]]:
    """Columns of a table without its index; None where a number is missing or not finite."""
    return {
        str(name): [None if isinstance(cell, float) and not math.isfinite(cell) else cell for cell in column.tolist()]
        for name, column in table.items()
    }


def ticks_of(index: pd.Index) -> npt.NDArray[np.int64]:
    """An index as whole numbers: ticks of its unit, ordinals of its period, or its own."""
    return np.asarray(index.asi8 if isinstance(index, pd.DatetimeIndex | pd.PeriodIndex) else index, dtype=np.int64)


def index_kind(index: pd.Index) -> dict[str, Any]:
    """What `index_from_ticks` needs besides the numbers."""
    kind: dict[str, Any] = {"name": to_json("index name", index.name)}
    if isinstance(index, pd.DatetimeIndex):
        return kind | {"kind": "datetime", "unit": index.unit, "tz": None if index.tz is None else str(index.tz)}
    if isinstance(index, pd.PeriodIndex):
        return kind | {"kind": "period", "freq": index.freqstr}
    return kind | {"kind": "integer"}


def index_from_ticks(ticks: npt.NDArray[np.int64], kind: dict[str, Any]) -> pd.Index:
    """The index of `ticks_of` again; it raises whatever pandas raises where `kind` is damaged."""
    name = from_json(kind["name"])
    if kind["kind"] == "datetime":
        stamps = pd.DatetimeIndex(ticks.view(f"datetime64[{kind['unit']}]"), name=name)
        return stamps if kind["tz"] is None else stamps.tz_localize("UTC").tz_convert(kind["tz"])
    if kind["kind"] == "period":
        return pd.PeriodIndex.from_ordinals(ticks, freq=kind["freq"], name=name)  # type: ignore[attr-defined]
    if kind["kind"] != "integer":
        raise ValueError(f"its index is of an unknown kind {kind['kind']!r}")
    if len(ticks) > 1 and ticks[1] > ticks[0]:  # a regular grid: a range again
        return pd.RangeIndex(ticks[0], ticks[-1] + 1, ticks[1] - ticks[0], name=name)
    return pd.Index(ticks, name=name)
