"""Writing a forecast the way the table was written: same form, same labels, time stamps that continue its own."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import pandas as pd

from dualweaver.data.grid import continue_index
from dualweaver.data.layout import Layout
from dualweaver.errors import DataError

__all__ = ["MODEL_NAME", "future_index", "suffixed", "write_table"]

MODEL_NAME = "DualWeaver"  # names the forecast's column in the long form

Parts = Mapping[Any, np.ndarray]


def future_index(layout: Layout, index: pd.Index, horizon: int) -> pd.Index:
    """The `horizon` steps that follow a block's `index`: same kind, frequency, time zone and name."""
    return continue_index(index, layout.freq, horizon)


def write_table(
    layout: Layout, columns: Sequence[Hashable], forecasts: Iterable[tuple[Hashable | None, pd.Index, Parts]]
) -> pd.DataFrame:
    """One frame of all forecasts, in the form of the table that they continue.

    Args:
        columns: the channels of the arrays, which may be a part of the table's.
        forecasts: for each entity its label (or None), its time stamps, and its arrays `[horizon, channel]`. The key
            "mean" stands for the column's own name, a quantile level such as 0.9 appends `_q0.9` to it, and any other
            text is appended as it is. In the long form the name is that of the model.

    A time column comes back as time stamps also where it was text.
    """
    write = _write_long if layout.form == "long" else _write_wide
    frames = [write(layout, list(columns), *forecast) for forecast in forecasts]
    frame = frames[0] if len(frames) == 1 else pd.concat(frames, ignore_index=layout.time_column is not None)
    repeated = frame.columns[frame.columns.duplicated()].tolist()
    if repeated:
        raise DataError(f"the forecast would have two columns named {repeated[0]!r}: rename the one in the table")
    return frame


def _write_wide(
    layout: Layout, columns: list[Hashable], entity: Hashable | None, index: pd.Index, parts: Parts
) -> pd.DataFrame:
    labels: list[Hashable] = []
    series: list[Any] = []
    place = {label: position for position, label in enumerate(columns)}
    for label in (*layout.columns, *(label for label in columns if label not in layout.columns)):
        if label in place:
            labels += [suffixed(label, key) for key in parts]
            series += [array[:, place[label]] for array in parts.values()]
        elif label == layout.time_column:
            labels.append(label)
            series.append(index)
        elif label == layout.entity_column:
            labels.append(label)
            series.append([entity] * len(index))
    rows = pd.RangeIndex(len(index)) if layout.time_column is not None else index.rename(layout.index_name)
    frame = pd.DataFrame({number: pd.Series(values, index=rows) for number, values in enumerate(series)}, index=rows)
    names = layout.column_names
    if len(names) > 1:
        frame.columns = pd.MultiIndex.from_tuples(cast("list[tuple[Hashable, ...]]", labels), names=names)
    else:
        frame.columns = pd.Index(labels, name=names[0], tupleize_cols=False)
    return frame


def _write_long(
    layout: Layout, columns: list[Hashable], _entity: Hashable | None, index: pd.Index, parts: Parts
) -> pd.DataFrame:
    data: dict[Hashable, Any] = {}
    for label in layout.columns:
        if label == layout.id_column:
            data[label] = pd.Series(columns).repeat(len(index)).reset_index(drop=True)
        elif label == layout.time_column:
            data[label] = index.take(np.tile(np.arange(len(index)), len(columns)))
    for key, array in parts.items():
        data[suffixed(MODEL_NAME, key)] = array.T.ravel()
    return pd.DataFrame(data)


def suffixed(label: Hashable, key: Any) -> Hashable:
    """The name of a column with a forecast of `label`; `key` as in `write_table`."""
    if key == "mean":
        return label
    suffix = key if isinstance(key, str) else f"_q{key:g}"
    if not isinstance(label, tuple):
        return f"{label}{suffix}"
    named = [level for level, part in enumerate(label) if part != ""]  # the last level may be padding
    last = named[-1] if named else 0
    return (*label[:last], f"{label[last]}{suffix}", *label[last + 1 :])
