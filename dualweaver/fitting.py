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

from dualweaver.adapters import AdaPTS, DualWeaverAdapter, ZeroShot
from dualweaver.backbones import Backbone, Forecast
from dualweaver.cache import kept_for, remembered
from dualweaver.calibration import Calibration
from dualweaver.data.frames import Block
from dualweaver.data.windows import WindowDataset
from dualweaver.effort import epoch_windows, validation_windows
from dualweaver.errors import SettingError
from dualweaver.fit_windows import VALUES_AT_ONCE, choose_context, fit_scaler, make_windows, validation_start
from dualweaver.pipeline import Pipeline, context_spread, forecast_windows, mix_targets
from dualweaver.planning.search import plan_stages
from dualweaver.precision import choose_precision
from dualweaver.resume import ResumeFolder, describe_fit
from dualweaver.settings import FitSettings
from dualweaver.stages import make_stages, train_stages

__all__ = ["Fitted", "Rung", "fit_pipeline"]

# A target with which the frozen model's forecasts correlate no more than this is noise to it, and counts little in
# training, where its large errors would drown what there is to learn about the others. A little, as other channels may
# tell its future.
NOISE_CORRELATION, NOISE_WEIGHT = 0.05, 0.1
VALIDATION_VALUES = 2**22  # forecast values kept in memory at most when validation is scored


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


@dataclass(frozen=True)
class _Task:
    """What all rungs of a fit have in common: the frozen model, the windows, and how zero-shot does on them.

    Attributes:
        targets: positions of the channels to forecast.
        untouched, baseline, calibration: zero-shot's forecasts of the validation windows, their error per target, and
            offsets of their quantiles.
        truth: of validation windows, `[window, step, target]`.
        spread: `context_spread` of their contexts.
        weights: how much each target counts in training.
    """

    backbone: Backbone
    targets: Sequence[int]
    scaler: StandardScaler
    context_length: int
    train: WindowDataset
    validation: WindowDataset
    untouched: Forecast
    truth: torch.Tensor
    spread: npt.NDArray[np.float64]
    baseline: npt.NDArray[np.float64]
    calibration: Calibration
    weights: torch.Tensor


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
    task = _make_task(backbone, blocks, targets, settings)
    if resume is not None:
        resume.claim(describe_fit(settings, task.backbone, task.scaler, list(targets), task.train, task.validation))
    rungs: list[Rung] = []
    tuned: Backbone | None = None
    for wanted in settings.rungs():
        rung, interrupted = _train_rung(task, wanted, tuned, resume)
        rungs.append(rung)
        tuned = rung.pipeline.backbone if wanted.trains_backbone else None
        if interrupted:
            break
    chosen = min(rungs, key=lambda rung: float(rung.error.mean()))
    history = pd.concat([rung.history for rung in rungs], ignore_index=True) if len(rungs) > 1 else rungs[0].history
    return Fitted(chosen, rungs, history, _scores(chosen, task.baseline))


def _make_task(backbone: Backbone, blocks: Sequence[Block], targets: Sequence[int], settings: FitSettings) -> _Task:
    borders = [validation_start(len(block.index), settings) for block in blocks]
    channels = blocks[0].values.shape[1]
    stages = [stage for rung in settings.rungs() for stage in make_stages(rung.make_adapter(channels, targets), rung)]
    future = max((stage.future_steps(backbone, settings.horizon) for stage in stages), default=0)
    context = choose_context(backbone, [len(block.index) for block in blocks], borders, future, settings)
    scaler = fit_scaler([block.values[:border] for block, border in zip(blocks, borders, strict=True)])
    series = max((stage.series_per_step for stage in stages), default=len(targets))
    wanted = validation_windows(epoch_windows(backbone, context, settings.horizon, series))
    wanted = min(wanted, max(1, VALIDATION_VALUES // (settings.horizon * len(targets))))
    train, validation = make_windows(blocks, borders, scaler, context, future, settings.horizon, wanted)
    truth = validation.windows[validation.starts, context:].index_select(-1, torch.as_tensor(targets))

    def zero_shot(backbone: Backbone) -> Forecast:
        plain = ZeroShot(channels, targets)
        plain.series_at_once = settings.series_at_once
        return _zero_shot(plain, backbone, validation, context, settings.seed)

    if settings.loaded_precision == "auto":
        backbone = choose_precision(backbone, lambda model: float(_channel_error(zero_shot(model).mean, truth).mean()))
    untouched = zero_shot(backbone)
    centre, spread = _centre_and_spread(validation, context, np.asarray(targets))
    return _Task(
        backbone,
        targets,
        scaler,
        context,
        train,
        validation,
        untouched,
        truth,
        spread,
        baseline=_channel_error(untouched.mean, truth),
        calibration=_calibrate(untouched, truth, spread),
        weights=_target_weights(untouched.mean, truth, centre),
    )


def _train_rung(
    task: _Task, rung: FitSettings, tuned: Backbone | None, resume: ResumeFolder | None
) -> tuple[Rung, bool]:
    """One rung, and whether the user stopped its training; `tuned` is the model that the rung before has fine-tuned."""
    adapter = rung.make_adapter(task.train.values.shape[1], task.targets)
    stages = make_stages(adapter, rung)
    for stage in stages:
        published = isinstance(stage, AdaPTS) or (isinstance(stage, DualWeaverAdapter) and stage.native_loss)
        if not published:
            stage.weights.copy_(task.weights)
    if rung.memory_budget is not None:
        plan_stages(stages, task.backbone, rung, task.context_length, None if resume is None else resume.path)
    # a backbone that is trained is a copy: the caller's, and what zero-shot means, stay as they are
    inner = tuned or (copy.deepcopy(task.backbone) if rung.trains_backbone else task.backbone)
    nowhere = np.zeros(len(task.targets), dtype=bool)
    pipeline = Pipeline(inner, adapter, task.scaler, task.context_length, task.backbone, nowhere, seed=rung.seed)
    pipeline.untouched_calibration = pipeline.calibration = task.calibration
    left = stages if tuned is None else stages[-1:]
    place = "" if tuned is None else "fine-tuned: "
    history, interrupted = train_stages(left, pipeline, task.train, task.validation, rung, resume, place)
    error = task.baseline
    if stages:
        adapted, _ = forecast_windows(adapter, inner, task.validation, task.context_length, seed=rung.seed)
        adapted_error = _channel_error(adapted.mean, task.truth)
        pipeline.fallback = ~(adapted_error < task.baseline)
        error = np.where(pipeline.fallback, task.baseline, adapted_error)
        forecast = mix_targets(adapted, task.untouched, np.flatnonzero(pipeline.fallback))
        pipeline.calibration = _calibrate(forecast, task.truth, task.spread)
    return Rung(rung, pipeline, error, history), interrupted


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


def _centre_and_spread(
    windows: WindowDataset, context: int, targets: npt.NDArray[np.int64]
) -> tuple[torch.Tensor, npt.NDArray[np.float64]]:
    """Mean and `context_spread` of the contexts of many windows, `[window, target]` each; a few windows at a time."""
    centres, spreads = [], []
    for chunk in torch.arange(len(windows)).split(VALUES_AT_ONCE // (windows.length * windows.values.shape[1]) or 1):
        contexts = windows.__getitems__(chunk.tolist())[:, :context]
        centres.append(contexts.index_select(-1, torch.as_tensor(targets)).double().mean(dim=1))
        spreads.append(context_spread(contexts, targets))
    return torch.cat(centres), np.concatenate(spreads)


def _target_weights(forecast: torch.Tensor, truth: torch.Tensor, centre: torch.Tensor) -> torch.Tensor:
    """How much each target counts, `[target]`; `centre` holds the means of the contexts, `[window, target]`."""
    foreseen, happened = (values.double() - centre[:, None] for values in (forecast, truth))
    sizes = foreseen.square().sum(dim=(0, 1)) * happened.square().sum(dim=(0, 1))
    correlation = (foreseen * happened).sum(dim=(0, 1)) / sizes.sqrt()
    weights = torch.where(correlation > NOISE_CORRELATION, 1.0, NOISE_WEIGHT)
    return weights if (weights == 1).any() else torch.ones_like(weights)


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
