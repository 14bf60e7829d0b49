"""How a table was written: which column is the time, which names the entity, wide or long; kept to answer likewise."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

from dualweaver.data.frequency import Freq
from dualweaver.data.times import IndexKind, looks_like_codes, looks_like_dates, quoted
from dualweaver.errors import DataError

__all__ = ["Layout", "Roles", "find_roles"]

Form = Literal["wide", "long"]
LONG_COLUMNS = ("unique_id", "ds", "y")  # the long format of the Nixtla libraries
_TIME_NAMES = frozenset({"date", "ds", "time", "timestamp", "datetime"})


@dataclass(frozen=True)
class Layout:
    """How a table was written, so that a forecast can be written the same way.

    `columns` are all the columns of the table in its order, keys included; `column_names` names the levels of the
    column index. `freq` is a pandas alias, or the step of an integer index.
    """

    form: Form
    columns: tuple[Hashable, ...]
    index_kind: IndexKind
    freq: Freq
    freq_given: bool = False  # the user chose it: gaps and stamps off the grid are repaired
    time_column: Hashable | None = None  # None: the index is the time
    entity_column: Hashable | None = None  # panel: several independent systems with the same variables
    id_column: Hashable | None = None  # long form only
    value_column: Hashable | None = None  # long form only
    tz: str | None = None
    index_name: Hashable | None = None
    column_names: tuple[Hashable, ...] = (None,)

    def to_dict(self) -> dict[str, Any]:
        """The layout in plain JSON types."""
        return {name: _to_json(value) for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Layout:
        try:
            return cls(**{name: _from_json(value) for name, value in stored.items()})
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise DataError(f"the stored description of the table is damaged: {error}") from None


def _to_json(value: Any) -> Any:
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, pd.Timestamp):
        return {"timestamp": value.isoformat(), "tz": None if value.tz is None else str(value.tz)}
    if isinstance(value, np.generic):
        return _to_json(value.item())
    raise DataError(
        f"the label {value!r} of type {type(value).__name__} cannot be saved: rename it to text or a number"
    )


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_from_json(item) for item in value)
    if not isinstance(value, dict):
        return value
    stamp = pd.Timestamp(value["timestamp"])  # with its offset only: the zone has a name
    return stamp if value["tz"] is None else stamp.tz_convert(value["tz"])


@dataclass(frozen=True)
class Roles:
    """Which columns of a frame are keys, and which hold values: what can be told before any value is read."""

    form: Form
    time_column: Hashable | None
    entity_column: Hashable | None
    channels: tuple[Hashable, ...]  # wide form: the columns with values


def find_roles(frame: pd.DataFrame, time_column: Hashable | None, entity_column: Hashable | None) -> Roles:
    """Tell the form of a frame, and its keys where the user did not name them."""
    columns = frame.columns.tolist()
    repeated = frame.columns[frame.columns.duplicated()].unique().tolist()
    if repeated:
        raise DataError(f"the table has more than one column named {quoted(repeated)}: rename or drop them")
    for argument, label in (("time_column", time_column), ("entity_column", entity_column)):
        if label is not None and label not in columns:
            raise DataError(f"{argument}={label!r} is not a column of the table, which has {quoted(columns)}")
    if time_column is not None and time_column == entity_column:
        raise DataError(f"time_column and entity_column are both {time_column!r}: they must be two columns")
    if time_column in (None, "ds") and entity_column is None and set(LONG_COLUMNS) <= set(columns):
        return Roles("long", "ds", None, ())
    if time_column is None and _is_plain(frame.index):
        time_column = _find_time_column(frame, entity_column)
    channels = tuple(label for label in columns if label not in (time_column, entity_column))
    if not channels:
        only = f", only {quoted(columns)}" if columns else ""
        raise DataError(f"the table has no numeric column{only}: add the values to forecast")
    return Roles("wide", time_column, entity_column, channels)


def _is_plain(index: pd.Index) -> bool:
    """An index that only counts rows, as pandas makes when none is asked for (and then filters or sorts)."""
    return index.name is None and pd.api.types.is_integer_dtype(index.dtype)


def _means_time(label: Hashable) -> bool:
    return isinstance(label, str) and label.lower() in _TIME_NAMES


def _find_time_column(frame: pd.DataFrame, entity_column: Hashable | None) -> Hashable | None:
    """The one column of dates, or None; a telling name decides between several."""
    found = [
        label
        for position, label in enumerate(frame.columns.tolist())
        if label != entity_column
        and (
            looks_like_dates(frame.iloc[:, position])
            or (_means_time(label) and looks_like_codes(frame.iloc[:, position]))
        )
    ]
    if len(found) > 1:
        named = [label for label in found if _means_time(label)]
        found = named if len(named) == 1 else found
    if len(found) > 1:
        raise DataError(f"the columns {quoted(found)} all hold dates: say which is the time with time_column=")
    return found[0] if found else None
