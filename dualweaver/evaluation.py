"""Rolling-origin evaluation of a fitted pipeline, beside zero-shot and seasonal naive.

Errors come from utilsforecast, on a tidy frame in the form that the Nixtla libraries use for cross-validation.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
from utilsforecast.evaluation import evaluate
from utilsforecast.losses import mae, mse, rmse, smape

from dualweaver.data.frames import Block
from dualweaver.errors import DataError, SettingError
from dualweaver.pipeline import Pipeline

__all__ = ["BacktestReport", "backtest", "season_length"]

METHODS = ("DualWeaver", "zero-shot", "seasonal-naive")
METRICS = (mse, mae, rmse, smape)

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
        scores: one row a channel and metric, one column a forecaster, in the data's units.
        forecasts: every forecast with its truth: `unique_id`, `ds`, `cutoff`, `y` and one column a forecaster.
        windows: origins per entity.
    """

    scores: pd.DataFrame
    forecasts: pd.DataFrame
    windows: int

    def table(self, metric: str = "mse") -> pd.DataFrame:
        """One row a channel and a last one with the mean, forecasters beside each other, for one metric.

        `gain` is the share of the zero-shot error that is gone; its mean is that over the channels.
        """
        known = sorted(self.scores["metric"].unique())
        if metric not in known:
            raise SettingError(f"metric={metric!r}: expected one of {', '.join(known)}")
        rows = self.scores[self.scores["metric"] == metric].drop(columns="metric").set_index("unique_id")
        rows["gain"] = 1 - rows["DualWeaver"] / rows["zero-shot"]
        rows.loc["mean"] = rows.mean()
        return rows

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
    length = pipeline.context_length
    parts = []
    for block in blocks:
        needed = length + horizon + (windows - 1) * step
        if len(block.index) < needed:
            where = "the table" if block.entity is None else f"entity {block.entity!r}"
            raise DataError(
                f"{where} has {len(block.index)} rows; {windows} windows of {length} steps of context and a horizon of "
                f"{horizon} need {needed}: lower windows, step or horizon"
            )
        last = len(block.index) - horizon
        origins = np.arange(last - (windows - 1) * step, last + 1, step)
        contexts = np.stack([block.values[origin - length : origin] for origin in origins])
        forecasts = {
            "DualWeaver": pipeline.forecast(contexts, horizon).mean,
            "zero-shot": pipeline.zero_shot().forecast(contexts, horizon).mean,
            "seasonal-naive": _seasonal_naive(contexts[..., pipeline.targets], horizon, season),
        }
        parts += [
            _tidy(block, int(origin), column, int(target), {name: values[row, :, position] for name, values in forecasts.items()})
            for row, origin in enumerate(origins)
            for position, (column, target) in enumerate(zip(columns, pipeline.targets, strict=True))
        ]
    tidy = pd.concat(parts, ignore_index=True)
    scores = evaluate(tidy.dropna(subset="y").drop(columns="cutoff"), metrics=list(METRICS), models=list(METHODS))
    order = {name: position for position, name in enumerate(dict.fromkeys(tidy["unique_id"]))}
    scores = scores.sort_values("unique_id", key=lambda ids: ids.map(order), kind="stable", ignore_index=True)
    return BacktestReport(scores, tidy, windows)


def _seasonal_naive(contexts: npt.NDArray[np.float64], horizon: int, season: int) -> npt.NDArray[np.float64]:
    season = min(season, contexts.shape[1])
    return contexts[:, -season:][:, np.arange(horizon) % season]


def _tidy(
    block: Block, origin: int, column: Hashable, target: int, forecasts: dict[str, npt.NDArray[np.float64]]
) -> pd.DataFrame:
    horizon = len(next(iter(forecasts.values())))
    rows = slice(origin, origin + horizon)
    stamps = block.index.to_timestamp() if isinstance(block.index, pd.PeriodIndex) else block.index
    truth = np.where(block.observed[rows, target], block.values[rows, target], np.nan)
    name = str(column) if block.entity is None else f"{block.entity}/{column}"
    return pd.DataFrame({"unique_id": name, "ds": stamps[rows], "cutoff": stamps[origin - 1], "y": truth, **forecasts})
