"""History, forecast and band of each channel in one figure."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dualweaver.data.layout import Layout
from dualweaver.data.writing import MODEL_NAME, suffixed
from dualweaver.errors import DataError, SettingError
from dualweaver.forecast.calibration import edges_of

__all__ = ["Band", "plot_channels", "plot_steps", "split_forecast"]

# the forecaster first, then what it is compared with
_STYLES: tuple[dict[str, Any], ...] = (
    {"color": "C0", "linewidth": 1.6},
    {"color": "C1", "linewidth": 1.1, "linestyle": "--"},
    {"color": "0.6", "linewidth": 1.1, "linestyle": ":"},
)

Band = tuple[pd.DataFrame, pd.DataFrame, str]  # lower edge, upper edge, label


def plot_channels(
    history: pd.DataFrame,
    forecasts: Mapping[str, pd.DataFrame],
    *,
    bands: Sequence[Band] = (),
    truth: pd.DataFrame | None = None,
    columns: Sequence[Hashable] | None = None,
    title: str | None = None,
) -> Figure:
    """One panel a channel.

    Args:
        history: `[time, channel]`, what the forecast starts from.
        forecasts: by label, `[horizon, channel]` each; the first is drawn strongest.
        bands: lower edge, upper edge and label of each band.
        truth: what came, where it is known.
        columns: channels to draw, all that were forecast by default.
    """
    first = next(iter(forecasts.values()))
    chosen = list(first.columns if columns is None else columns)
    unknown = [column for column in chosen if column not in first.columns]
    if unknown or not chosen:
        raise SettingError(f"columns={unknown or chosen!r} are not among those forecast: {list(first.columns)!r}")
    figure, axes = _panels(len(chosen))
    for axis, column in zip(axes, chosen, strict=True):
        _panel(axis, column, history, forecasts, bands, truth)
    _add_legend(figure)
    figure.autofmt_xdate()
    if title:
        figure.suptitle(title)
    return figure


def plot_steps(errors: pd.DataFrame, forecasters: Sequence[str], metric: str) -> Figure:
    """One panel a channel: the error of each forecaster by step ahead.

    Args:
        errors: a row a channel (`unique_id`) and step (the index), a column a forecaster.
    """
    channels = list(dict.fromkeys(errors["unique_id"]))
    figure, axes = _panels(len(channels))
    for axis, channel in zip(axes, channels, strict=True):
        rows = errors[errors["unique_id"] == channel]
        for name, style in zip(forecasters, _STYLES, strict=False):
            axis.plot(rows.index, rows[name], label=name, **style)
        axis.set_title(channel, fontsize=10, loc="left")
        axis.set_ylabel(metric)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("steps ahead")
    _add_legend(figure)
    return figure


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels, in two columns where there are many."""
    rows, across = ((count + 1) // 2, 2) if count > 3 else (count, 1)
    figure = Figure(figsize=(6.5 * across, 2.1 * rows + 0.8), layout="constrained")
    axes = list(figure.subplots(rows, across, squeeze=False, sharex=True).flat)
    for axis in axes[count:]:
        axis.remove()
        axes[count - 2].tick_params(labelbottom=True)  # nothing stands below this one
    return figure, axes[:count]


def _add_legend(figure: Figure) -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)


def split_forecast(
    layout: Layout, columns: Sequence[Hashable], forecast: pd.DataFrame
) -> tuple[pd.DataFrame, Band | None]:
    """A frame from `predict`, of one entity, as points `[horizon, channel]` and the band of its outermost quantiles."""
    if layout.form == "long":
        if MODEL_NAME not in forecast.columns:
            raise DataError(f"this is no forecast of a long table: it has no column {MODEL_NAME!r}")
        tables = {
            name: forecast.pivot(index=layout.time_column, columns=layout.id_column, values=name)  # noqa: PD010
            for name in forecast.columns
            if name not in (layout.time_column, layout.id_column)
        }
        parts = {str(name)[len(MODEL_NAME) :]: table for name, table in tables.items()}
        points = parts.pop("")
        points = points[[column for column in columns if column in points.columns]]
    else:
        table = forecast if layout.time_column is None else forecast.set_index(layout.time_column)
        points = table[[column for column in columns if column in table.columns]]
        if points.shape[1] == 0:
            raise DataError(f"this is no forecast of {list(columns)[:8]!r}: it has the columns {list(table.columns)!r}")
        parts = {}
        for suffix in {match[0] for name in table.columns if (match := _SUFFIX.search(_text(name)))}:
            names = [suffixed(column, suffix) for column in points.columns]
            if all(name in table.columns for name in names):
                parts[suffix] = table[names].set_axis(points.columns, axis=1)
    levels = {level: part for suffix, part in parts.items() if (level := _level_of(suffix)) is not None}
    if len(levels) < 2:
        return points, None
    low, high = min(levels), max(levels)
    if math.isclose(low + high, 1):
        return points, (levels[low], levels[high], f"{100 * (high - low):.4g} % interval")
    return points, (levels[low], levels[high], f"{low:g} to {high:g} quantile")


_SUFFIX = re.compile(r"(?:_q(?P<quantile>[\d.]+(?:e-\d+)?)|-(?P<side>lo|hi)-(?P<width>[\d.]+))$")


def _level_of(suffix: str) -> float | None:
    """The quantile level that a column's suffix stands for, such as 0.9 for both `_q0.9` and `-hi-80`."""
    match = _SUFFIX.fullmatch(suffix)
    if match is None:
        return None
    if match["quantile"]:
        return float(match["quantile"])
    return edges_of(float(match["width"]))[match["side"] == "hi"]


def _text(label: Hashable) -> str:
    """The part of a label that carries a suffix; in a label of several levels, the last that is named."""
    return str([part for part in label if part != ""][-1] if isinstance(label, tuple) and any(label) else label)


def _panel(
    axis: Axes,
    column: Hashable,
    history: pd.DataFrame,
    forecasts: Mapping[str, pd.DataFrame],
    bands: Sequence[Band],
    truth: pd.DataFrame | None,
) -> None:
    axis.plot(_stamps(history.index), history[column], color="0.35", linewidth=0.9, label="history")
    if truth is not None:
        axis.plot(_stamps(truth.index), truth[column], color="black", linewidth=1.0, label="what came")
    for lower, upper, label in bands:
        axis.fill_between(
            _stamps(lower.index), lower[column], upper[column], color="C0", alpha=0.2, linewidth=0, label=label
        )
    for position, (label, frame) in enumerate(forecasts.items()):
        axis.plot(_stamps(frame.index), frame[column], label=label, **_STYLES[min(position, 1)])
    axis.set_title(str(column), fontsize=10, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(x=0.01)


def _stamps(index: pd.Index) -> pd.Index:
    return index.to_timestamp() if isinstance(index, pd.PeriodIndex) else index
