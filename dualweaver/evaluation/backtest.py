"""Rolling-origin evaluation of a fitted pipeline, beside zero-shot and seasonal naive.

Errors come from utilsforecast, on a tidy frame in the form that the Nixtla libraries use for cross-validation.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.figure import Figure
from utilsforecast.evaluation import evaluate
from utilsforecast.losses import coverage, mae, mqloss, mse, rmse, smape

from dualweaver.data.frames import Block
from dualweaver.errors import DataError, SettingError
from dualweaver.evaluation.plots import plot_steps
from dualweaver.forecast.calibration import edges_of
from dualweaver.forecast.pipeline import Pipeline

__all__ = ["METRIC_NAMES", "BacktestReport", "backtest", "season_length"]

Array = npt.NDArray[np.float64]

METHODS = ("DualWeaver", "zero-shot", "seasonal-naive")
POINT_METRICS = (mse, mae, rmse, smape)
METRIC_NAMES = ("mse", "mae", "rmse", "smape", "mase", "pinball", "coverage_80")
WIDTHS = (20, 40, 60, 80)  # central intervals in per cent; their edges are the deciles but the median

# steps of the season that a naive forecast repeats, by pandas alias without its multiple and anchor
_SEASONS = {
    "s": 60,
    "min": 1440,
    "h": 24,
    "D": 7,
    "B": 5,
    "W": 52,
    "ME": 12,
    "MS": 12,
    "M": 12,
    "QE": 4,
    "QS": 4,
    "Q": 4,
}


@dataclass(frozen=True)
class BacktestReport:
    """What `DualWeaver.backtest` found.

    Attributes:
        scores: one row a channel and metric, one column a forecaster, in the data's units. Metrics are mse, mae, rmse,
            smape, mase (mae over that of a seasonal naive forecast of the rows before), pinball (mean over the deciles
            but the median; half of the CRPS, nearly) and coverage_80 (share of the truth inside the 80 % interval).
        steps: mse and mae of every channel at every step ahead: `unique_id`, `step`, `metric`, one column a forecaster.
        forecasts: every forecast with its truth: `unique_id`, `ds`, `cutoff`, `step`, `y`, and a column a forecaster
            with its intervals, named as in the Nixtla libraries. `y` is missing where it was in the data.
        windows: origins per entity.
    """

    scores: pd.DataFrame
    steps: pd.DataFrame
    forecasts: pd.DataFrame
    windows: int

    def table(self, metric: str = "mse") -> pd.DataFrame:
        """One row a channel and a last one with the mean, forecasters beside each other, for one metric.

        `gain` is the share of the zero-shot error that is gone; its mean is that over the channels.
        """
        known = list(dict.fromkeys(self.scores["metric"]))
        if metric not in known:
            raise SettingError(f"metric={metric!r}: expected one of {', '.join(known)}")
        rows = self.scores[self.scores["metric"] == metric].drop(columns="metric").set_index("unique_id")
        if not metric.startswith("coverage"):
            rows["gain"] = 1 - rows["DualWeaver"] / rows["zero-shot"]
        return pd.concat([rows, rows.mean().to_frame("mean").T]).rename_axis("unique_id")

    def plot(self, metric: str = "mse") -> Figure:
        """How the error of every channel grows with the steps ahead, by forecaster."""
        known = list(dict.fromkeys(self.steps["metric"]))
        if metric not in known:
            raise SettingError(f"metric={metric!r}: by step there are {', '.join(known)}")
        rows = self.steps[self.steps["metric"] == metric]
        return plot_steps(rows.set_index("step").drop(columns="metric"), METHODS, metric)

    def __str__(self) -> str:
        return self.table().to_string(float_format=lambda value: f"{value:.4g}")


def season_length(freq: str | int) -> int:
    """Steps of the natural season of a frequency: 24 for hours, 7 for days, 96 for quarters of an hour, else 1."""
    if isinstance(freq, int):
        return 1
    unit = freq.lstrip("0123456789")
    multiple = int(freq[: len(freq) - len(unit)] or 1)
    return max(1, _SEASONS.get(unit.split("-")[0], 1) // multiple)


def backtest(
    pipeline: Pipeline,
    blocks: Sequence[Block],
    columns: Sequence[Hashable],
    *,
    horizon: int,
    windows: int,
    step: int,
    season: int,
) -> BacktestReport:
    """Forecast the last `windows` origins of every block, `step` rows apart, without fitting again.

    Cells that were missing in the data are not scored.
    """
    length, targets = pipeline.context_length, pipeline.targets
    names = _names(blocks, columns)
    parts: list[pd.DataFrame] = []
    scales: dict[str, float] = {}
    for block, ids in zip(blocks, names, strict=True):
        needed = length + horizon + (windows - 1) * step
        if len(block.index) < needed:
            raise DataError(
                f"{block.name} has {len(block.index)} rows; {windows} windows of {length} steps of context and a "
                f"horizon of {horizon} need {needed}: lower windows, step or horizon"
            )
        last = len(block.index) - horizon
        origins = np.arange(last - (windows - 1) * step, last + 1, step)
        # a view of all contexts [window, time, channel]; chunks of it are copied on the way
        every = np.lib.stride_tricks.sliding_window_view(block.values, length, axis=0)
        contexts = every[origins[0] - length : last - length + 1 : step].transpose(0, 2, 1)
        forecasts = _with_intervals("DualWeaver", pipeline, contexts, horizon)
        forecasts |= _with_intervals("zero-shot", pipeline.zero_shot(), contexts, horizon)
        forecasts["seasonal-naive"] = _seasonal_naive(contexts[:, -season:, targets], horizon)
        parts.append(_tidy(block, origins, ids, targets, forecasts))
        scales |= dict(zip(ids, _naive_errors(block, int(origins[0]), targets, season), strict=True))
    tidy = pd.concat(parts, ignore_index=True)
    if tidy["y"].isna().all():
        raise DataError("the rows to score hold no known value: pass a frame whose end is not missing")
    return BacktestReport(_scores(tidy, scales), _step_scores(tidy), tidy, windows)


def _names(blocks: Sequence[Block], columns: Sequence[Hashable]) -> list[list[str]]:
    """What each block's channels are called in the report; labels that read alike, such as 1 and "1", are quoted."""
    plain = [str(column) for column in columns]
    if len(set(plain)) < len(plain):
        plain = [repr(column) for column in columns]
    return [plain if block.entity is None else [f"{block.entity}/{name}" for name in plain] for block in blocks]


def _with_intervals(name: str, pipeline: Pipeline, contexts: Array, horizon: int) -> dict[str, Array]:
    """Point forecast and edges of all intervals, `[window, step, target]` each."""
    edges = {f"{name}-lo-{width}": edges_of(width)[0] for width in reversed(WIDTHS)}
    edges |= {f"{name}-hi-{width}": edges_of(width)[1] for width in WIDTHS}
    forecast = pipeline.forecast(contexts, horizon, tuple(edges.values()))
    assert forecast.quantiles is not None
    return {name: forecast.mean} | {key: forecast.quantiles[..., at] for at, key in enumerate(edges)}


def _seasonal_naive(last_season: Array, horizon: int) -> Array:
    return last_season[:, np.arange(horizon) % last_season.shape[1]]


def _naive_errors(block: Block, origin: int, targets: npt.NDArray[np.int64], season: int) -> Array:
    """Mean absolute change over a season in the rows before the first origin, per target; NaN where there is none."""
    values = np.where(block.observed[:origin, targets], block.values[:origin, targets], np.nan)
    changes = np.abs(values[season:] - values[:-season])
    known = np.isfinite(changes)
    sums, counts = np.where(known, changes, 0).sum(axis=0), known.sum(axis=0)
    return np.where((counts > 0) & (sums > 0), sums / np.maximum(counts, 1), np.nan)


def _tidy(
    block: Block,
    origins: npt.NDArray[np.int64],
    ids: Sequence[str],
    targets: npt.NDArray[np.int64],
    forecasts: dict[str, Array],
) -> pd.DataFrame:
    """One row a window, channel and step, in this order; arrays are `[window, step, target]`."""
    horizon = forecasts["DualWeaver"].shape[1]
    rows = origins[:, None] + np.arange(horizon)
    truth = np.where(block.observed[rows], block.values[rows], np.nan)[..., targets]
    stamps = block.index.to_timestamp() if isinstance(block.index, pd.PeriodIndex) else block.index
    columns: dict[str, Any] = {
        "unique_id": np.tile(np.repeat(np.asarray(ids, dtype=object), horizon), len(origins)),
        "ds": stamps.take(np.repeat(rows, len(ids), axis=0).ravel()),
        "cutoff": stamps.take(np.repeat(origins - 1, len(ids) * horizon)),
        "step": np.tile(np.arange(1, horizon + 1), len(origins) * len(ids)),
    }
    return pd.DataFrame(columns | {name: _flat(array) for name, array in ({"y": truth} | forecasts).items()})


def _flat(array: Array) -> Array:
    return array.transpose(0, 2, 1).ravel()


def _scores(tidy: pd.DataFrame, scales: dict[str, float]) -> pd.DataFrame:
    known = tidy.dropna(subset="y").drop(columns=["cutoff", "step"])
    points = evaluate(known, metrics=list(POINT_METRICS), models=list(METHODS))
    relative = points[points["metric"] == "mae"].assign(metric="mase")
    relative[list(METHODS)] = relative[list(METHODS)].div(relative["unique_id"].map(scales), axis=0)
    intervals = evaluate(known, metrics=[mqloss, coverage], models=list(METHODS[:2]), level=list(WIDTHS))
    intervals["metric"] = intervals["metric"].replace({"mqloss": "pinball", "coverage_level80": "coverage_80"})
    scores = pd.concat([points, relative, intervals])
    scores = scores[scores["metric"].isin(METRIC_NAMES)]
    return _in_order(scores, tidy, metric=list(METRIC_NAMES))


def _step_scores(tidy: pd.DataFrame) -> pd.DataFrame:
    known = tidy.dropna(subset="y").drop(columns="cutoff")
    cells = known.groupby(["unique_id", "step"], sort=False)
    scores = evaluate(known.assign(cell=cells.ngroup()), metrics=[mse, mae], models=list(METHODS), id_col="cell")
    labels = known[["unique_id", "step"]].drop_duplicates(ignore_index=True)  # numbered as they come, like the cells
    scores = pd.concat([labels.loc[scores.pop("cell")].reset_index(drop=True), scores], axis=1)
    return _in_order(scores, tidy, metric=["mse", "mae"])


def _in_order(scores: pd.DataFrame, tidy: pd.DataFrame, *, metric: list[str]) -> pd.DataFrame:
    """Channels as in the table, metrics as listed, steps ascending."""
    place = {name: position for position, name in enumerate([*dict.fromkeys(tidy["unique_id"]), *metric])}
    keys = [name for name in ("unique_id", "metric", "step") if name in scores]
    return scores.sort_values(
        keys, key=lambda column: column if column.name == "step" else column.map(place), ignore_index=True
    )
