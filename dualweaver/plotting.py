"""History, forecast and band of each channel in one figure."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dualweaver.data.layout import Layout
from dualweaver.data.writing import MODEL_NAME

__all__ = ["Band", "plot_channels", "split_forecast"]

Band = tuple[pd.DataFrame, pd.DataFrame, str]  # lower edge, upper edge, label

Array = npt.NDArray[np.float64]


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
    chosen = list(columns if columns is not None else first.columns)
    rows = (len(chosen) + 1) // 2 if len(chosen) > 3 else len(chosen)
    across = 2 if len(chosen) > 3 else 1
    figure = Figure(figsize=(6.5 * across, 2.1 * rows + 0.8), layout="constrained")
    axes = figure.subplots(rows, across, squeeze=False, sharex=True)
    for axis, column in zip(axes.flat, chosen, strict=False):
        _panel(axis, column, history, forecasts, bands, truth)
    for axis in axes.flat[len(chosen) :]:
        axis.set_visible(False)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.autofmt_xdate()
    if title:
        figure.suptitle(title)
    return figure


def split_forecast(
    layout: Layout, columns: Sequence[Hashable], forecast: pd.DataFrame
) -> tuple[pd.DataFrame, Band | None]:
    """A frame from `predict`, of one entity, as points `[horizon, channel]` and the band of its outermost quantiles."""
    if layout.form == "long":
        parts = {
            name: forecast.pivot(index=layout.time_column, columns=layout.id_column, values=name)  # noqa: PD010
            for name in forecast.columns
            if str(name).startswith(MODEL_NAME)
        }
        levels = {float(str(name)[len(MODEL_NAME) + 2 :]): part for name, part in parts.items() if name != MODEL_NAME}
        points = parts[MODEL_NAME]
    else:
        table = forecast if layout.time_column is None else forecast.set_index(layout.time_column)
        points = table[[column for column in columns if column in table.columns]]
        found = {match[1] for name in table.columns if (match := re.search(r"_q(0?\.\d+(?:e-\d+)?)$", str(name)))}
        levels = {
            float(level): table[[f"{column}_q{level}" for column in points.columns]].set_axis(points.columns, axis=1)
            for level in found
        }
    if len(levels) < 2:
        return points, None
    low, high = min(levels), max(levels)
    return points, (levels[low], levels[high], f"{low:g} to {high:g} quantile")


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
    styles = [{"color": "C0", "linewidth": 1.6}, {"color": "C1", "linewidth": 1.1, "linestyle": "--"}]
    for position, (label, frame) in enumerate(forecasts.items()):
        axis.plot(_stamps(frame.index), frame[column], label=label, **styles[min(position, 1)])  # type: ignore[arg-type]
    axis.set_title(str(column), fontsize=10, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(x=0.01)


def _stamps(index: pd.Index) -> pd.Index:
    return index.to_timestamp() if isinstance(index, pd.PeriodIndex) else index
