"""`DualWeaver`, the estimator: fit on a frame, forecast what follows it."""

from __future__ import annotations

import os
import sys
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from matplotlib.figure import Figure
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted
from torch import nn

from dualweaver.adapters import DualWeaverAdapter
from dualweaver.backbones.precision import load_in_precision
from dualweaver.data.frames import Block, Layout, Table, future_index, read_table, write_table
from dualweaver.errors import DataError, SettingError
from dualweaver.evaluation.backtest import BacktestReport, backtest, season_length
from dualweaver.evaluation.plots import plot_channels, split_forecast
from dualweaver.fit.fitting import fit_pipeline
from dualweaver.fit.resume import ResumeFolder
from dualweaver.forecast.blocks import check_magnitudes, forecast_blocks, tail_of
from dualweaver.forecast.calibration import check_levels, check_percentages, edges_of
from dualweaver.forecast.pipeline import Pipeline
from dualweaver.method.influence import channel_influence, spread_contexts
from dualweaver.notices import notify
from dualweaver.settings import AUTO, FitSettings, Options, documented

__all__ = ["DualWeaver"]


@documented
class DualWeaver(Options, BaseEstimator):
    """Multivariate forecaster around a frozen univariate foundation model.

    Source: arXiv 2602.22066. A small fusion module writes two surrogate series per target channel, the frozen model
    forecasts both, and their difference gives the forecast. Where that does not beat the untouched model on validation
    rows, a channel falls back to it.

    Args:
        {options}

    Attributes:
        columns_: channels in the order of the frame. targets_: those that are forecast.
        history_: one row an epoch: `stage`, `epoch`, `train_loss`, `val_mse`, `learning_rate`.
        scores_: one row a target: validation error of the forecaster and of zero-shot (mean squared, scaled units),
            the gain, and which of the two forecasts.
        context_length_: past steps that a forecast sees.
        adapter_, fine_tuned_: which adapter forecasts, and whether on a fine-tuned backbone.
        plan_: how it was trained, a `dualweaver.compute.Plan`; None without a `memory_budget`.
        pipeline_: the fitted parts, arrays in and out.
    """

    layout_: Layout
    columns_: tuple[Hashable, ...]
    targets_: tuple[Hashable, ...]
    pipeline_: Pipeline

    def fit(self, df: Any, y: None = None, *, resume: str | os.PathLike[str] | None = None) -> DualWeaver:
        """Adapt the backbone to a frame and remember its last rows.

        Args:
            df: wide (one row a time step, one numeric column a channel), long (`unique_id`, `ds`, `y`), or wide per
                entity with `entity_column`.
            y: unused, for scikit-learn.
            resume: folder that keeps how far the fit has come. The same fit with the same folder goes on from there,
                after a crash or Ctrl-C, and ends with the bits of an undisturbed one; see `dualweaver.fit.resume`.

        Raises:
            SettingError: an argument is out of range.
            DataError: the frame cannot be used; the message names the column, entity or stamp.
            CheckpointError: the resume folder belongs to another fit, or cannot be written.
        """
        settings = FitSettings.checked(self)
        check_levels(() if self.quantiles is None else self.quantiles)
        table = read_table(
            df,
            time_column=self.time_column,
            entity_column=self.entity_column,
            freq=self.freq,
            missing=self.missing,
            missing_values=self.missing_values,
        )
        check_magnitudes(table.blocks, table.columns)
        targets = self._target_positions(table.columns)
        backbone = load_in_precision(self.backbone, settings.loaded_precision, self.context_length)
        if settings.horizon > backbone.native_horizon:
            notify(
                f"horizon {settings.horizon} is beyond the backbone's native horizon of {backbone.native_horizon} "
                "steps: forecasts are rolled forward, fed back as context"
            )
        kept = None if resume is None else ResumeFolder(resume, list(map(repr, table.columns)))
        fitted = fit_pipeline(backbone, table.blocks, targets, settings, kept)
        self.layout_, self.columns_ = table.layout, table.columns
        self.targets_ = tuple(table.columns[position] for position in targets)
        self.pipeline_ = fitted.pipeline
        self.context_length_ = fitted.pipeline.context_length
        self.history_ = fitted.history
        self.adapter_, self.fine_tuned_ = fitted.chosen.settings.adapter, fitted.chosen.settings.trains_backbone
        self.plan_ = fitted.pipeline.adapter.plan
        self.scores_ = fitted.scores.set_axis(pd.Index(self.targets_, name="channel", tupleize_cols=False))
        rows = max(self.context_length_, 2 * settings.horizon)  # what a forecast sees, and what a plot shows
        self.tails_ = tuple(tail_of(block, rows) for block in table.blocks)
        self.n_features_in_ = len(self.columns_)
        if self.verbose:
            print(self._summary(), file=sys.stderr)
        return self

    def predict(
        self,
        df: Any = None,
        horizon: int | None = None,
        quantiles: Sequence[float] | None = None,
        level: Sequence[float] | None = None,
    ) -> pd.DataFrame:
        """Forecast the steps after a frame.

        Args:
            df: what to continue, with the columns of `fit` in any order; the fitted frame's end by default.
            horizon: steps ahead, the fitted horizon by default.
            quantiles: levels in (0, 1) to add, those of the constructor by default; columns are named
                `<column>_q<level>`.
            level: widths of central intervals in per cent, such as [80, 95]; columns are named `<column>-lo-80` and
                `<column>-hi-80`, as in the Nixtla libraries.

        Returns:
            A frame in the form of the fitted one, in its units, with the time stamps that follow. In the long form the
            forecast's column is called `DualWeaver`.
        """
        check_is_fitted(self, "pipeline_")
        horizon = _positive("horizon", self.horizon if horizon is None else horizon)
        keys = _quantile_columns(self.quantiles if quantiles is None else quantiles, level)
        levels = tuple(sorted(set(keys.values())))
        blocks = self.tails_ if df is None else self._read(df).blocks
        forecasts = forecast_blocks(self.pipeline_, blocks, self.targets_, horizon, levels, fitted_horizon=self.horizon)
        parts = []
        for block, forecast in zip(blocks, forecasts, strict=True):
            arrays: dict[str | float, npt.NDArray[np.float64]] = {"mean": forecast.mean[0]}
            if forecast.quantiles is not None:
                arrays |= {key: forecast.quantiles[0, ..., levels.index(at)] for key, at in keys.items()}
            parts.append((block.entity, future_index(self.layout_, block.index, horizon), arrays))
        return write_table(self.layout_, self.targets_, parts)

    def backtest(
        self, df: Any, windows: int = 8, *, horizon: int | None = None, step: int | None = None
    ) -> BacktestReport:
        """Score the last `windows` origins of a frame, without fitting again, beside zero-shot and seasonal naive.

        Rows that `fit` has seen flatter the scores; pass a frame whose end is new.

        Args:
            df: with the columns of `fit`; every origin needs the context before it.
            windows: origins per entity.
            horizon: steps ahead, the fitted horizon by default.
            step: rows between origins, the horizon by default.
        """
        check_is_fitted(self, "pipeline_")
        horizon = _positive("horizon", self.horizon if horizon is None else horizon)
        return backtest(
            self.pipeline_,
            self._read(df).blocks,
            self.targets_,
            horizon=horizon,
            windows=_positive("windows", windows),
            step=_positive("step", horizon if step is None else step),
            season=season_length(self.layout_.freq),
        )

    def plot(
        self,
        forecast: pd.DataFrame | None = None,
        *,
        df: Any = None,
        entity: Hashable | None = None,
        level: float = 80,
        columns: Sequence[Hashable] | None = None,
        history: int | None = None,
    ) -> Figure:
        """History, forecast and band of each channel.

        Args:
            forecast: what `predict` gave; made here if left out. Its outermost quantiles are the band.
            df: the frame that the forecast continues, that of `fit` by default.
            entity: which one to draw, where there are several.
            level: per cent that the band covers, where the forecast is made here.
            columns: channels to draw.
            history: past steps to draw, twice the forecast's by default.
        """
        check_is_fitted(self, "pipeline_")
        past = self._entity(self.tails_ if df is None else self._read(df).blocks, entity)
        if forecast is None:
            forecast = self.predict(df, quantiles=(), level=[level])
        if past.entity is not None:
            forecast = forecast[forecast[self.layout_.entity_column] == past.entity]
        points, band = split_forecast(self.layout_, self.targets_, forecast)
        rows = pd.DataFrame(past.values, index=past.index, columns=pd.Index(self.columns_, tupleize_cols=False))
        rows = rows.iloc[-(2 * len(points) if history is None else _positive("history", history)) :]
        return plot_channels(rows, {"DualWeaver": points}, bands=[band] if band else [], columns=columns)

    def channel_influence(self, df: Any = None, *, windows: int = 16) -> pd.DataFrame:
        """How strongly each channel acts on each target inside the adapter; see `dualweaver.method.influence`.

        Args:
            df: with the columns of `fit`; the fitted frame's end by default.
            windows: contexts per entity, evenly spread over the frame.

        Returns:
            One row a target, one column a channel, in standard deviations of the target a standard deviation of the
            channel. Targets that zero-shot forecasts are not influenced: their rows are zero.
        """
        check_is_fitted(self, "pipeline_")
        adapter = self.pipeline_.adapter
        if not isinstance(adapter, DualWeaverAdapter):
            raise SettingError(f"adapter={self.adapter_!r}: only 'dualweaver' says how channels act on each other")
        contexts = []
        for block in self.tails_ if df is None else self._read(df).blocks:
            contexts += spread_contexts(block.values, self.context_length_, _positive("windows", windows))
        if not contexts:
            raise DataError(f"no entity has {self.context_length_} rows, which a context takes")
        scaled = torch.stack([self.pipeline_.scale(context) for context in contexts])
        influence = channel_influence(adapter.weaver.cpu().eval(), scaled, seed=self.seed).numpy()
        influence[self.pipeline_.fallback] = 0
        targets, columns = (pd.Index(names, tupleize_cols=False) for names in (self.targets_, self.columns_))
        return pd.DataFrame(influence, index=targets.rename("target"), columns=columns)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the adapter (safetensors) and its settings (JSON) to a folder, whole or not at all.

        The backbone's weights are not copied unless they were fine-tuned: its name, checkpoint and fingerprint are.
        """
        from dualweaver.forecast.saving import save_forecaster

        check_is_fitted(self, "pipeline_")
        save_forecaster(self, folder)

    @classmethod
    def load(cls, folder: str | os.PathLike[str], *, backbone: str | nn.Module | None = None) -> DualWeaver:
        """A forecaster that `save` wrote.

        Args:
            folder: where it is.
            backbone: where the backbone is now, if it moved or was a module of your own; its fingerprint is checked.

        Raises:
            CheckpointError: a file is missing, damaged or foreign, or the backbone is not the one it was fitted with.
        """
        from dualweaver.forecast.saving import load_forecaster

        return load_forecaster(cls, folder, backbone)

    def _read(self, df: Any) -> Table:
        return read_table(
            df,
            time_column=self.time_column,
            entity_column=self.entity_column,
            columns=self.columns_,
            missing=self.missing,
            missing_values=self.missing_values,
            layout=self.layout_,
        )

    def _entity(self, blocks: Sequence[Block], entity: Hashable | None) -> Block:
        if entity is None and len(blocks) == 1:
            return blocks[0]
        known = [block.entity for block in blocks]
        if entity not in known:
            raise SettingError(f"entity={entity!r}: pass the one to draw, among {', '.join(map(repr, known[:8]))}")
        return blocks[known.index(entity)]

    def _target_positions(self, columns: tuple[Hashable, ...]) -> list[int]:
        if self.targets is None:
            return list(range(len(columns)))
        wanted = [self.targets] if isinstance(self.targets, str) else list(self.targets)
        unknown = [name for name in wanted if name not in columns]
        if unknown or not wanted:
            raise DataError(f"targets {unknown or wanted!r} are not among the columns {list(columns)!r}")
        return [columns.index(name) for name in dict.fromkeys(wanted)]

    def _summary(self) -> str:
        ours, plain = self.scores_["mse"].mean(), self.scores_["zero_shot_mse"].mean()
        back = self.scores_.index[self.scores_["forecaster"] == "zero-shot"].tolist()
        gain = f" ({1 - ours / plain:+.1%})" if plain > 0 else ""
        line = f"validation MSE {ours:.4f}, zero-shot {plain:.4f}{gain}"
        if self.adapter == AUTO:
            line += f"; kept: {self.adapter_}{' on a fine-tuned backbone' if self.fine_tuned_ else ''}"
        if back and self.adapter_ != "zero-shot":
            more = f" and {len(back) - 8} more" if len(back) > 8 else ""
            line += f"; no gain, so zero-shot forecasts: {', '.join(map(str, back[:8]))}{more}"
        return line


def _quantile_columns(quantiles: Sequence[float] | None, level: Sequence[float] | None) -> dict[str | float, float]:
    """What to append to a column's name, and the quantile that it holds; intervals from the outside in and out."""
    columns: dict[str | float, float] = {at: at for at in check_levels(() if quantiles is None else quantiles)}
    widths = check_percentages(() if level is None else level)
    columns |= {f"-lo-{width:g}": edges_of(width)[0] for width in reversed(widths)}
    return columns | {f"-hi-{width:g}": edges_of(width)[1] for width in widths}


def _positive(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise SettingError(f"{name}={value!r}: expected a whole number, 1 or more")
    return int(value)
