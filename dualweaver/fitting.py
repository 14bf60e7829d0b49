"""Fitting a pipeline to regular grids: split, scale, train, fall back, calibrate."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from sklearn.preprocessing import StandardScaler

from dualweaver.adapters import ADAPTERS, Adapter, FineTune, ZeroShot, make_adapter
from dualweaver.backbones import Backbone
from dualweaver.calibration import Calibration
from dualweaver.data.frames import Block
from dualweaver.data.module import WindowDataModule, stride_for
from dualweaver.data.windows import WindowDataset, window_starts
from dualweaver.errors import DataError, SettingError
from dualweaver.pipeline import Pipeline, forecast_windows
from dualweaver.training import TrainingSettings, seeded, train_adapter
from dualweaver.weaver import FUSIONS

__all__ = ["FitSettings", "Fitted", "fit_pipeline"]

TRAINING_WINDOWS = 2048  # an epoch, where window_stride is left to us
VALIDATION_VALUES = 2**22  # forecast values kept in memory at most when validation is scored
VALIDATION_WINDOWS = 512
SERIES_PER_BATCH = 2048  # series that carry gradients at once; wider batches are accumulated

LEARNING_RATES = {"dualweaver": 1e-3, "adapts": 1e-3, "fine-tune": 1e-4}


@dataclass(frozen=True)
class FitSettings:
    """The arguments of `DualWeaver` that fitting needs, checked."""

    horizon: int
    adapter: str
    fusion: str
    objective: str
    regularisation: float
    fine_tune: bool
    max_epochs: int
    batch_size: int
    learning_rate: float | None
    window_stride: int | None
    validation_size: float | int
    seed: int
    verbose: bool

    @classmethod
    def checked(cls, source: Any) -> FitSettings:
        """Read the arguments off an estimator; raise a SettingError that names the first wrong one."""
        settings = cls(**{name: getattr(source, name) for name in cls.__dataclass_fields__})
        for name in ("horizon", "max_epochs", "batch_size", "window_stride"):
            value = getattr(settings, name)
            if name == "window_stride" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise SettingError(f"{name}={value!r}: expected a whole number, 1 or more")
        for name, known in (
            ("adapter", sorted(ADAPTERS)),
            ("fusion", sorted(FUSIONS)),
            ("objective", ["paper", "reconstruction"]),
        ):
            if getattr(settings, name) not in known:
                raise SettingError(f"{name}={getattr(settings, name)!r}: expected one of {', '.join(known)}")
        size = settings.validation_size
        if not (0 < size < 1 if isinstance(size, float) else size >= 1):
            raise SettingError(f"validation_size={size!r}: expected a share in (0, 1) or a number of rows")
        if settings.learning_rate is not None and not settings.learning_rate > 0:
            raise SettingError(f"learning_rate={settings.learning_rate!r}: expected more than 0")
        if not settings.regularisation >= 0:
            raise SettingError(f"regularisation={settings.regularisation!r}: expected 0 or more")
        return settings

    @property
    def trains_backbone(self) -> bool:
        return self.fine_tune or self.adapter == FineTune.name

    def make_adapter(self, channels: int, targets: Sequence[int]) -> Adapter:
        extra: dict[str, Any] = {}
        if self.adapter == "dualweaver":
            extra = {"fusion": self.fusion, "objective": self.objective, "regularisation": self.regularisation}
        with seeded(self.seed):
            return make_adapter(self.adapter, channels, targets, **extra)


@dataclass(frozen=True)
class Fitted:
    """A fitted pipeline, the course of its training, and its validation scores (one row a target)."""

    pipeline: Pipeline
    history: pd.DataFrame
    scores: pd.DataFrame


def fit_pipeline(backbone: Backbone, blocks: Sequence[Block], targets: Sequence[int], settings: FitSettings) -> Fitted:
    """Train on the head of every block, select, fall back and calibrate on its tail.

    Args:
        backbone: frozen; its weights change only where `settings` say so.
        blocks: one an entity, `[time, channel]` each.
        targets: positions of the channels to forecast.
    """
    borders = [_validation_start(block, settings) for block in blocks]
    context = _context_for(backbone, blocks, borders, settings)
    channels = blocks[0].values.shape[1]
    scaler = StandardScaler().fit(np.concatenate([block.values[:b] for block, b in zip(blocks, borders, strict=True)]))
    train = _windows(
        [block.values[:border] for block, border in zip(blocks, borders, strict=True)],
        scaler,
        context,
        settings.horizon,
    )
    tails = [block.values[max(0, border - context) :] for block, border in zip(blocks, borders, strict=True)]
    wanted = min(VALIDATION_WINDOWS, max(1, VALIDATION_VALUES // (settings.horizon * len(targets))))
    validation = _windows(tails, scaler, context, settings.horizon, wanted)
    adapter = settings.make_adapter(channels, targets)
    pipeline = Pipeline(backbone, adapter, scaler, context, np.zeros(len(targets), dtype=bool), seed=settings.seed)
    untouched, truth = forecast_windows(pipeline.zero_shot().adapter, backbone, validation, context, seed=settings.seed)
    baseline = _channel_error(untouched.mean, truth)
    history = _train(pipeline, train, validation, settings) if settings.adapter != ZeroShot.name else _NO_HISTORY
    forecast, _ = forecast_windows(adapter, backbone, validation, context, seed=settings.seed)
    error = _channel_error(forecast.mean, truth)
    if not settings.trains_backbone:  # a fine-tuned backbone is no longer the one that zero-shot means
        pipeline.fallback = ~(error < baseline) if settings.adapter != ZeroShot.name else pipeline.fallback
        for row in np.flatnonzero(pipeline.fallback):
            forecast.mean[..., row] = untouched.mean[..., row]
            if forecast.quantiles is not None and untouched.quantiles is not None:
                forecast.quantiles[:, :, row] = untouched.quantiles[:, :, row]
        error = np.where(pipeline.fallback, baseline, error)
    quantiles = None if forecast.quantiles is None else forecast.quantiles.double().numpy()
    pipeline.calibration = Calibration.fit(
        truth.double().numpy(), forecast.mean.double().numpy(), quantiles, forecast.levels
    )
    return Fitted(pipeline, history, _scores(error, baseline, pipeline.fallback, settings.adapter))


_NO_HISTORY = pd.DataFrame(columns=["stage", "epoch", "val_mse", "train_loss", "learning_rate"])


def _train(pipeline: Pipeline, train: WindowDataset, validation: WindowDataset, settings: FitSettings) -> pd.DataFrame:
    """The stages of training in turn; weights are left at their best validation error."""
    stages: list[tuple[str, Adapter]] = [(settings.adapter, pipeline.adapter)]
    if settings.fine_tune and settings.adapter != FineTune.name:
        stages.insert(0, (FineTune.name, FineTune(pipeline.adapter.channels, pipeline.targets.tolist())))
    stride = settings.window_stride or stride_for(len(train), TRAINING_WINDOWS)
    rows = []
    for name, adapter in stages:
        accumulate, batch = _micro_batches(settings.batch_size, adapter.channels)
        data = WindowDataModule(
            train,
            validation,
            stride=stride,
            batch_size=batch,
            validation_batch_size=max(1, SERIES_PER_BATCH // (2 * adapter.channels)),
            seed=settings.seed,
        )
        training = TrainingSettings(
            max_epochs=settings.max_epochs,
            learning_rate=_learning_rate(settings, name),
            accumulate=accumulate,
            seed=settings.seed,
            verbose=settings.verbose,
        )
        course = train_adapter(
            adapter, pipeline.backbone, data, training, context_length=pipeline.context_length, label=name
        )
        rows += [{"stage": name, **row} for row in course.history]
    return pd.DataFrame(rows)


def _learning_rate(settings: FitSettings, stage: str) -> float:
    """The user's rate is that of the adapter asked for; a fine-tuning before it keeps its own."""
    if settings.learning_rate is not None and stage == settings.adapter:
        return settings.learning_rate
    return LEARNING_RATES[stage]


def _micro_batches(batch_size: int, channels: int) -> tuple[int, int]:
    """How many batches to accumulate, and their size, so that memory does not grow with the channels."""
    accumulate = math.ceil(batch_size * 2 * channels / SERIES_PER_BATCH)
    accumulate = min(accumulate, batch_size)
    return accumulate, math.ceil(batch_size / accumulate)


def _validation_start(block: Block, settings: FitSettings) -> int:
    rows, size = len(block.index), settings.validation_size
    return rows - max(settings.horizon, int(rows * size) if isinstance(size, float) else size)


def _context_for(backbone: Backbone, blocks: Sequence[Block], borders: Sequence[int], settings: FitSettings) -> int:
    """The backbone's context, shortened where the longest training part has no room for it."""
    training = settings.adapter != ZeroShot.name
    future = settings.horizon if training else 0
    room = max(borders) - future
    if room >= backbone.context_length:
        return backbone.context_length
    # half of what is left becomes windows, so that training sees more than a single one
    shortened = max(backbone.min_context, room // 2 if training else room)
    if shortened + future > max(borders):
        rows = max(len(block.index) for block in blocks)
        needed = rows - max(borders) + backbone.min_context + future
        raise DataError(
            f"{rows} rows are too few: {needed} are needed for a context of {backbone.min_context} steps (the least "
            f"that the backbone {backbone.name!r} takes), a horizon of {settings.horizon} and "
            f"{rows - max(borders)} validation rows"
        )
    warnings.warn(
        f"the frame has room for a context of {shortened} steps only, instead of {backbone.context_length}",
        UserWarning,
        stacklevel=4,
    )
    return shortened


def _windows(
    segments: Sequence[npt.NDArray[np.float64]], scaler: StandardScaler, context: int, horizon: int, wanted: int = 0
) -> WindowDataset:
    """Windows over scaled segments; about `wanted` of them if given, all otherwise."""
    length = context + horizon
    lengths = [len(segment) for segment in segments]
    total = len(window_starts(lengths, length))
    if total == 0:
        raise DataError(
            f"no entity has {length} consecutive rows for a context of {context} and a horizon of {horizon}"
        )
    values = np.empty((sum(lengths), segments[0].shape[1]), dtype=np.float32)
    first = 0
    for segment in segments:  # one segment at a time: the float64 intermediate stays small
        values[first : first + len(segment)] = scaler.transform(segment)
        first += len(segment)
    return WindowDataset(
        torch.from_numpy(values), window_starts(lengths, length, stride_for(total, wanted) if wanted else 1), length
    )


def _channel_error(forecast: torch.Tensor, truth: torch.Tensor) -> npt.NDArray[np.float64]:
    return (forecast - truth).double().square().mean(dim=(0, 1)).numpy()


def _scores(
    error: npt.NDArray[np.float64], baseline: npt.NDArray[np.float64], fallback: npt.NDArray[np.bool_], adapter: str
) -> pd.DataFrame:
    safe = np.maximum(baseline, np.finfo(float).tiny)
    return pd.DataFrame(
        {
            "mse": error,
            "zero_shot_mse": baseline,
            "gain": np.where(baseline > 0, 1 - error / safe, 0.0),
            "forecaster": np.where(fallback, ZeroShot.name, adapter),
        }
    )
