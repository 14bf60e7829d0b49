"""Fitting a pipeline to regular grids: split, scale, train, fall back, calibrate."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from sklearn.preprocessing import StandardScaler

from dualweaver.adapters import ZeroShot
from dualweaver.backbones import Backbone, Forecast
from dualweaver.cache import kept_for, remembered
from dualweaver.calibration import Calibration
from dualweaver.data.frames import Block
from dualweaver.data.module import stride_for
from dualweaver.data.windows import WindowDataset
from dualweaver.effort import epoch_windows, validation_windows
from dualweaver.errors import DataError, SettingError
from dualweaver.notices import notify
from dualweaver.pipeline import Pipeline, context_spread, forecast_windows, mix_targets
from dualweaver.planning.search import plan_stages
from dualweaver.precision import choose_precision
from dualweaver.resume import ResumeFolder, describe_fit
from dualweaver.settings import FitSettings
from dualweaver.stages import make_stages, train_stages

__all__ = ["Fitted", "Rung", "fit_pipeline"]

VALIDATION_VALUES = 2**22  # forecast values kept in memory at most when validation is scored
VALUES_AT_ONCE = 2**17  # cells that are scaled in one go: a copy of the whole table would double the memory


@dataclass(frozen=True)
class Rung:
    """One way to forecast, trained: a fit has one, but for `adapter="auto"`.

    Attributes:
        settings: with what is trained spelt out.
        error: on validation windows, per target, after falling back (mean squared, scaled units).
        history: one row an epoch.
    """

    settings: FitSettings
    pipeline: Pipeline
    error: npt.NDArray[np.float64]
    history: pd.DataFrame


@dataclass(frozen=True)
class Fitted:
    """What validation prefers of the rungs, the course of all training, and validation scores (one row a target)."""

    chosen: Rung
    rungs: Sequence[Rung]
    history: pd.DataFrame
    scores: pd.DataFrame

    @property
    def pipeline(self) -> Pipeline:
        return self.chosen.pipeline


def fit_pipeline(
    backbone: Backbone,
    blocks: Sequence[Block],
    targets: Sequence[int],
    settings: FitSettings,
    resume: ResumeFolder | None = None,
) -> Fitted:
    """Train on the head of every block, select, fall back and calibrate on its tail.

    Args:
        backbone: frozen; its weights change only where `settings` say so.
        blocks: one an entity, `[time, channel]` each.
        targets: positions of the channels to forecast.
        resume: where to keep how far training has come, and to go on from.
    """
    if resume is not None and settings.devices > 1:
        raise SettingError("resume keeps the fit of one process: with devices > 1 do without it")
    borders = [_validation_start(len(block.index), settings) for block in blocks]
    channels = blocks[0].values.shape[1]
    adapter = settings.make_adapter(channels, targets)
    stages = [stage for rung in settings.rungs() for stage in make_stages(rung.make_adapter(channels, targets), rung)]
    future = max((stage.future_steps(backbone, settings.horizon) for stage in stages), default=0)
    context = _context_for(backbone, [len(block.index) for block in blocks], borders, future, settings)
    scaler = _fit_scaler([block.values[:border] for block, border in zip(blocks, borders, strict=True)])
    series = max((stage.series_per_step for stage in stages), default=len(targets))
    wanted = validation_windows(epoch_windows(backbone, context, settings.horizon, series))
    wanted = min(wanted, max(1, VALIDATION_VALUES // (settings.horizon * len(targets))))
    train, validation = _datasets(blocks, borders, scaler, context, future, settings.horizon, wanted)
    truth = validation.windows[validation.starts, context:].index_select(-1, torch.as_tensor(targets))

    def zero_shot(backbone: Backbone) -> Forecast:
        plain = ZeroShot(channels, targets)
        plain.series_at_once = adapter.series_at_once
        return _zero_shot(plain, backbone, validation, context, settings.seed)

    if settings.loaded_precision == "auto":
        backbone = choose_precision(backbone, lambda model: float(_channel_error(zero_shot(model).mean, truth).mean()))
    if resume is not None:
        resume.claim(describe_fit(settings, backbone, scaler, list(targets), train, validation))
    untouched = zero_shot(backbone)
    spread = _spreads(validation, context, targets)
    baseline = _channel_error(untouched.mean, truth)
    plain_calibration = _calibrate(untouched, truth, spread)

    def train_rung(rung: FitSettings, tuned: Backbone | None) -> tuple[Rung, bool]:
        adapter = rung.make_adapter(channels, targets)
        stages = make_stages(adapter, rung)
        if rung.memory_budget is not None:
            plan_stages(stages, backbone, rung, context, None if resume is None else resume.path)
        # a backbone that is trained is a copy: the caller's, and what zero-shot means, stay as they are
        inner = tuned or (copy.deepcopy(backbone) if rung.trains_backbone else backbone)
        nowhere = np.zeros(len(targets), dtype=bool)
        pipeline = Pipeline(inner, adapter, scaler, context, backbone, nowhere, seed=settings.seed)
        pipeline.untouched_calibration = pipeline.calibration = plain_calibration
        left = stages if tuned is None else stages[-1:]
        place = "" if tuned is None else "fine-tuned: "
        history, interrupted = train_stages(left, pipeline, train, validation, rung, resume, place)
        error = baseline
        if stages:
            adapted, _ = forecast_windows(adapter, inner, validation, context, seed=settings.seed)
            adapted_error = _channel_error(adapted.mean, truth)
            pipeline.fallback = ~(adapted_error < baseline)
            error = np.where(pipeline.fallback, baseline, adapted_error)
            forecast = mix_targets(adapted, untouched, np.flatnonzero(pipeline.fallback))
            pipeline.calibration = _calibrate(forecast, truth, spread)
        return Rung(rung, pipeline, error, history), interrupted

    rungs: list[Rung] = []
    tuned: Backbone | None = None
    for wanted_rung in settings.rungs():
        rung, interrupted = train_rung(wanted_rung, tuned)
        rungs.append(rung)
        tuned = rung.pipeline.backbone if wanted_rung.trains_backbone else None
        if interrupted:
            break
    chosen = min(rungs, key=lambda rung: float(rung.error.mean()))
    history = pd.concat([rung.history for rung in rungs], ignore_index=True) if len(rungs) > 1 else rungs[0].history
    return Fitted(chosen, rungs, history, _scores(chosen, baseline))


def _zero_shot(plain: ZeroShot, backbone: Backbone, windows: WindowDataset, context: int, seed: int) -> Forecast:
    """The untouched backbone's forecasts of many windows, in scaled units."""

    def compute() -> dict[str, torch.Tensor]:
        forecast, _ = forecast_windows(plain, backbone, windows, context, seed=seed)
        quantiles = {} if forecast.quantiles is None else {"quantiles": forecast.quantiles}
        return {"mean": forecast.mean, "levels": torch.tensor(forecast.levels, dtype=torch.float64), **quantiles}

    found = remembered(kept_for(backbone, windows, "zero-shot", plain.targets.tolist(), context, seed), compute)
    return Forecast(found["mean"], found.get("quantiles"), tuple(found["levels"].tolist()))


def _calibrate(forecast: Forecast, truth: torch.Tensor, spread: npt.NDArray[np.float64]) -> Calibration:
    quantiles = None if forecast.quantiles is None else forecast.quantiles.double().numpy()
    return Calibration.fit(truth.double().numpy(), forecast.mean.double().numpy(), quantiles, forecast.levels, spread)


def _spreads(windows: WindowDataset, context: int, targets: Sequence[int]) -> npt.NDArray[np.float64]:
    """`context_spread` of many windows, a few at a time."""
    chunks = torch.arange(len(windows)).split(VALUES_AT_ONCE // (windows.length * windows.values.shape[1]) or 1)
    contexts = (windows.__getitems__(chunk.tolist())[:, :context] for chunk in chunks)
    return np.concatenate([context_spread(part, np.asarray(targets)) for part in contexts])


def _validation_start(rows: int, settings: FitSettings) -> int:
    """First validation row; 0 where an entity is too short to train on."""
    size = settings.validation_size
    return max(0, rows - max(settings.horizon, int(rows * size) if isinstance(size, float) else size))


def _rows_needed(training_rows: int, settings: FitSettings) -> int:
    """The fewest rows of an entity that leave so many before its validation rows."""
    rows = training_rows + settings.horizon
    while _validation_start(rows, settings) < training_rows:
        rows += training_rows - _validation_start(rows, settings)
    return rows


def _context_for(
    backbone: Backbone, rows: Sequence[int], borders: Sequence[int], future: int, settings: FitSettings
) -> int:
    """The context asked for, shortened where the longest training part has no room for it and `future` steps."""
    wanted = settings.context_length or backbone.context_length
    if not backbone.min_context <= wanted <= backbone.context_length:  # a backbone object, made for another context
        raise SettingError(
            f"context_length={wanted}: the {backbone.name!r} backbone handed in takes {backbone.min_context} to "
            f"{backbone.context_length} steps"
        )
    room = max(borders) - future
    if room >= wanted:
        return wanted
    # half of what is left becomes windows, so that training sees more than a single one
    shortened = max(backbone.min_context, room // 2 if future else room)
    if shortened > room:
        ahead = f"a horizon of {settings.horizon}"
        if future > settings.horizon:
            ahead = f"the {future} steps ahead that the backbone's own loss looks at"
        raise DataError(
            f"{max(rows)} rows are too few: at least {_rows_needed(backbone.min_context + future, settings)} are "
            f"needed for a context of {backbone.min_context} steps (the least that the backbone {backbone.name!r} "
            f"takes), {ahead} and validation_size={settings.validation_size}"
        )
    notify(f"the frame has room for a context of {shortened} steps only, instead of {wanted}")
    return shortened


def _fit_scaler(parts: Sequence[npt.NDArray[np.float64]]) -> StandardScaler:
    """Mean and deviation of every channel over the training rows.

    A channel that never moves is scaled by its size instead, so that its later moves are of a harmless size too.
    """
    scaler = StandardScaler()
    for part in parts:
        for rows in _pieces(len(part), part.shape[1]):
            scaler.partial_fit(part[rows])
    still = ~np.isclose(scaler.scale_**2, scaler.var_, rtol=1e-3, atol=0)  # where scikit-learn took 1 for it
    scaler.scale_[still & (scaler.mean_ != 0)] = np.abs(scaler.mean_[still & (scaler.mean_ != 0)])
    return scaler


def _pieces(rows: int, channels: int) -> list[slice]:
    at_once = max(1, VALUES_AT_ONCE // channels)
    return [slice(first, min(first + at_once, rows)) for first in range(0, rows, at_once)]


def _datasets(
    blocks: Sequence[Block],
    borders: Sequence[int],
    scaler: StandardScaler,
    context: int,
    future: int,
    horizon: int,
    wanted: int,
) -> tuple[WindowDataset, WindowDataset]:
    """Training and validation windows, both views of one float32 table `[time, channel]` of all entities.

    Training windows hold `future` steps after the context (0: nothing is trained), validation windows a horizon.
    Validation windows forecast validation rows only; about `wanted` of them are kept.
    """
    values = torch.empty(sum(len(block.index) for block in blocks), blocks[0].values.shape[1])
    heads, tails, first = [], [], 0
    for block, border in zip(blocks, borders, strict=True):
        rows = len(block.index)
        for piece in _pieces(rows, values.shape[1]):
            scaled = torch.from_numpy(scaler.transform(block.values[piece]))
            values[first + piece.start : first + piece.stop] = scaled
        heads.append(range(first, first + border))
        tails.append(range(first + max(0, border - context), first + rows))
        first += rows
    length = context + horizon
    stride = stride_for(sum(map(len, _starts(tails, length))), wanted)
    validation = WindowDataset(values, _listed(_starts(tails, length, stride)), length)
    train = WindowDataset(values, _listed(_starts(heads, context + future) if future else []), context + future)
    for windows, needed in ((train, future), (validation, horizon)):
        if needed and len(windows) == 0:
            raise DataError(
                f"no entity has {windows.length} consecutive rows for a context of {context} and {needed} steps ahead"
            )
    return train, validation


def _starts(segments: Sequence[range], length: int, stride: int = 1) -> list[range]:
    """First rows of the windows inside each segment of a table, as in `window_starts`: counted from its end."""
    lasts = [(rows.start, rows.stop - length) for rows in segments]
    return [range(first + (last - first) % stride, last + 1, stride) for first, last in lasts if last >= first]


def _listed(starts: Sequence[range]) -> torch.Tensor:
    parts = [torch.arange(part.start, part.stop, part.step) for part in starts]
    return parts[0] if len(parts) == 1 else torch.cat([torch.empty(0, dtype=torch.int64), *parts])


def _channel_error(forecast: torch.Tensor, truth: torch.Tensor) -> npt.NDArray[np.float64]:
    return (forecast - truth).double().square().mean(dim=(0, 1)).numpy()


def _scores(rung: Rung, baseline: npt.NDArray[np.float64]) -> pd.DataFrame:
    safe = np.maximum(baseline, np.finfo(float).tiny)
    return pd.DataFrame(
        {
            "mse": rung.error,
            "zero_shot_mse": baseline,
            "gain": np.where(baseline > 0, 1 - rung.error / safe, 0.0),
            "forecaster": np.where(rung.pipeline.fallback, ZeroShot.name, rung.settings.adapter),
        }
    )
