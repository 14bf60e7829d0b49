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

from dualweaver.adapters import AdaPTS, DualWeaverAdapter, Joint, ZeroShot
from dualweaver.backbones import Backbone, Forecast
from dualweaver.backbones.precision import choose_precision
from dualweaver.data.frames import Block
from dualweaver.data.windows import WindowDataset
from dualweaver.errors import SettingError
from dualweaver.fit.cache import kept_for, remembered
from dualweaver.fit.effort import epoch_windows, validation_windows
from dualweaver.fit.plans import plan_stages
from dualweaver.fit.resume import ResumeFolder, describe_fit
from dualweaver.fit.selection import channel_error, goes_back, lowest, target_weights
from dualweaver.fit.stages import Stages, make_stages
from dualweaver.fit.windows import VALUES_AT_ONCE, choose_context, fit_scaler, make_windows, validation_start
from dualweaver.forecast.calibration import Calibration
from dualweaver.forecast.pipeline import Pipeline, context_spread, forecast_windows, mix_targets
from dualweaver.settings import FitSettings

__all__ = ["Candidate", "Fitted", "fit_pipeline"]

VALIDATION_VALUES = 2**22  # forecast values kept in memory at most when validation is scored


@dataclass(frozen=True)
class Candidate:
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
    """What validation prefers, all candidates, the course of training, and validation scores (one row a target)."""

    chosen: Candidate
    candidates: Sequence[Candidate]
    history: pd.DataFrame
    scores: pd.DataFrame

    @property
    def pipeline(self) -> Pipeline:
        return self.chosen.pipeline


@dataclass(frozen=True)
class _Task:
    """What all candidates of a fit have in common: the frozen model, the windows, and how zero-shot does on them.

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
    if settings.adapter == Joint.name and not backbone.multivariate:
        backbone.joint(torch.empty(0))  # says so
    task = _make_task(backbone, blocks, targets, settings)
    if resume is not None:
        resume.claim(describe_fit(settings, task.backbone, task.scaler, list(targets), task.train, task.validation))
    candidates: list[Candidate] = []
    tuned: Backbone | None = None
    for wanted in settings.candidates(backbone.multivariate):
        candidate, interrupted = _train_candidate(task, wanted, tuned, resume)
        candidates.append(candidate)
        tuned = candidate.pipeline.backbone if wanted.trains_backbone else None
        if interrupted:
            break
    chosen = candidates[lowest({at: float(one.error.mean()) for at, one in enumerate(candidates)})]
    courses = [candidate.history for candidate in candidates]
    history = pd.concat(courses, ignore_index=True) if len(courses) > 1 else courses[0]
    return Fitted(chosen, candidates, history, _scores(chosen, task.baseline))


def _make_task(backbone: Backbone, blocks: Sequence[Block], targets: Sequence[int], settings: FitSettings) -> _Task:
    borders = [validation_start(len(block.index), settings) for block in blocks]
    channels = blocks[0].values.shape[1]
    stages = [stage for one in settings.candidates() for stage in make_stages(one.make_adapter(channels, targets), one)]
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
        backbone = choose_precision(backbone, lambda model: float(channel_error(zero_shot(model).mean, truth).mean()))
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
        baseline=channel_error(untouched.mean, truth),
        calibration=_calibrate(untouched, truth, spread),
        weights=target_weights(untouched.mean, truth, centre),
    )


def _train_candidate(
    task: _Task, settings: FitSettings, tuned: Backbone | None, resume: ResumeFolder | None
) -> tuple[Candidate, bool]:
    """One candidate, and whether the user stopped its training; `tuned` is what the one before has fine-tuned."""
    adapter = settings.make_adapter(task.train.values.shape[1], task.targets)
    stages = make_stages(adapter, settings)
    for stage in stages:
        published = isinstance(stage, AdaPTS) or (isinstance(stage, DualWeaverAdapter) and stage.native_loss)
        if not published:
            stage.weights.copy_(task.weights)
    if settings.memory_budget is not None:
        plan_stages(stages, task.backbone, settings, task.context_length, None if resume is None else resume.path)
    # a backbone that is trained is a copy: the caller's, and what zero-shot means, stay as they are
    inner = tuned or (copy.deepcopy(task.backbone) if settings.trains_backbone else task.backbone)
    nowhere = np.zeros(len(task.targets), dtype=bool)
    pipeline = Pipeline(inner, adapter, task.scaler, task.context_length, task.backbone, nowhere, seed=settings.seed)
    pipeline.untouched_calibration = pipeline.calibration = task.calibration
    left = stages if tuned is None else stages[-1:]
    place = "" if tuned is None else "fine-tuned: "
    course = Stages(pipeline, task.train, task.validation, settings, resume, place)
    history = course.run(left)
    error = task.baseline
    if adapter.name != ZeroShot.name:
        adapted, _ = forecast_windows(adapter, inner, task.validation, task.context_length, seed=settings.seed)
        adapted_error = channel_error(adapted.mean, task.truth)
        pipeline.fallback = goes_back(adapted_error, task.baseline)
        error = np.where(pipeline.fallback, task.baseline, adapted_error)
        forecast = mix_targets(adapted, task.untouched, np.flatnonzero(pipeline.fallback))
        pipeline.calibration = _calibrate(forecast, task.truth, task.spread)
    return Candidate(settings, pipeline, error, history), course.interrupted


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


def _scores(candidate: Candidate, baseline: npt.NDArray[np.float64]) -> pd.DataFrame:
    safe = np.maximum(baseline, np.finfo(float).tiny)
    return pd.DataFrame(
        {
            "mse": candidate.error,
            "zero_shot_mse": baseline,
            "gain": np.where(baseline > 0, 1 - candidate.error / safe, 0.0),
            "forecaster": np.where(candidate.pipeline.fallback, ZeroShot.name, candidate.settings.adapter),
        }
    )
