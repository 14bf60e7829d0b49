"""What `fit` trains, and in which order: fine-tuning, the linear pre-fit of AdaPTS, the adapter."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from dualweaver.adapters import Adapter, AdaPTS, DualWeaverAdapter, FineTune, ZeroShot
from dualweaver.cache import Kept, kept_for
from dualweaver.compilation import compiled
from dualweaver.data.module import WindowDataModule, stride_for
from dualweaver.data.windows import WindowDataset
from dualweaver.effort import epoch_windows
from dualweaver.pipeline import Pipeline
from dualweaver.planning.limits import processes
from dualweaver.resume import ResumeFolder, Stage
from dualweaver.settings import FitSettings
from dualweaver.shares import choose_share
from dualweaver.training import KeptWeights, TrainingSettings, train_adapter
from dualweaver.weaver import FILTER_STRENGTH

__all__ = ["fit_reconstruction", "make_stages", "train_stages"]

SERIES_PER_BATCH = 2048  # series that carry gradients at once; wider batches are accumulated

LEARNING_RATES = {"dualweaver": 3e-3, "adapts": 1e-3}
# Around a fine-tuned backbone, which has left less to learn; a few steps at that rate would get nowhere.
TUNED_RATE, TUNED_STEPS = 1e-3, 16
PATIENCE = 3  # epochs without a better validation error, after which training stops
TUNED_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
FINE_TUNING_RATES = (1e-5, 1e-4, 1e-3)  # each is tried for one epoch, where the user names none

# The pre-fit of AdaPTS. Each epoch sees random rows, so that its cost does not grow with the table.
RECONSTRUCTION_EPOCHS, RECONSTRUCTION_PATIENCE = 300, 10
RECONSTRUCTION_ROWS, RECONSTRUCTION_BATCH = 8192, 256
RECONSTRUCTION_RATE = 1e-3


class _FilterCourse(NamedTuple):
    """How a filter is trained (`TrainingSettings.patience`), and what is then chosen from (as `choose_share` says)."""

    patience: int | None
    shares: Sequence[float] | None = None
    freely: float = FILTER_STRENGTH


# Around an untouched backbone a filter is trained to the end of its schedule: the epoch that validation preferred did
# worse on other rows. Around a fine-tuned backbone this was no better; there, the best epoch is kept, with whichever
# share of its edit has the lowest error.
AROUND_UNTOUCHED = _FilterCourse(patience=None)
AROUND_TUNED = _FilterCourse(PATIENCE, TUNED_SHARES, freely=1.0)

COLUMNS = ["stage", "epoch", "train_loss", "val_mse", "learning_rate"]
History = list[dict[str, Any]]


def make_stages(adapter: Adapter, settings: FitSettings) -> list[Adapter]:
    """What is trained in turn to end with `adapter`; nothing for zero-shot."""
    if adapter.name == ZeroShot.name:
        return []
    if settings.fine_tune and adapter.name != FineTune.name:
        return [FineTune(adapter.channels, adapter.targets.tolist()), adapter]
    return [adapter]


def train_stages(
    stages: Sequence[Adapter],
    pipeline: Pipeline,
    train: WindowDataset,
    validation: WindowDataset,
    settings: FitSettings,
    resume: ResumeFolder | None = None,
    place: str = "",
) -> tuple[pd.DataFrame, bool]:
    """Train one stage after the other; each is left at its best validation error, or its last epoch (`_FilterCourse`).

    Args:
        stages: what `make_stages` gave for the pipeline's adapter.
        pipeline: its backbone is the one that is fine-tuned, where a stage does that.
        train: windows with the most `Adapter.future_steps` that any stage needs.
        validation: windows of context and horizon.
        settings: those of the fit.
        resume: where to keep how far training has come, and to go on from.
        place: what the names of stages begin with, where one fit has several of a kind.

    Returns:
        One row an epoch: `stage`, `epoch`, `train_loss`, `val_mse`, `learning_rate`; and whether the user stopped it.
        In "adapts: reconstruction", `val_mse` is the error of the rows that encoder and decoder reproduce, not that of
        forecasts.
    """
    history: History = []
    interrupted = False
    for adapter in stages:
        if isinstance(adapter, AdaPTS):
            seen = train.values[_covered(train)]
            unseen = validation.values[_covered(validation, pipeline.context_length)]
            name = f"{adapter.name}: reconstruction"
            history += _named(name, _reconstruct(adapter, seen, unseen, settings.seed, _stage(resume, name)))
        rate = settings.learning_rate if adapter is pipeline.adapter else None
        stride = _stride(adapter, pipeline, train, settings)
        if rate is None and isinstance(adapter, FineTune):
            rate, trials = _choose_rate(adapter, pipeline, train, validation, settings, stride, resume)
            history += trials
            if rate is None:
                interrupted = True
                break
        if rate is None:
            rate = _usual_rate(adapter, settings, steps=math.ceil(len(train) / stride / settings.batch_size))
        name = place + adapter.name
        trained = _train_stage(adapter, pipeline, train, validation, settings, stride, rate, _stage(resume, name))
        history += _named(name, trained.history)
        interrupted = trained.interrupted
        if interrupted:
            break
        if isinstance(adapter, DualWeaverAdapter) and adapter.shares and trained.epoch > 0:
            course = _filter_course(settings)
            given = (adapter, pipeline.backbone, validation, pipeline.context_length, settings.seed)
            errors = choose_share(*given, course.shares, freely=course.freely)
            history += [{"stage": f"{name}: share {at:g}", "epoch": 0, "val_mse": mse} for at, mse in errors.items()]
    return pd.DataFrame(history, columns=COLUMNS), interrupted


def _filter_course(settings: FitSettings) -> _FilterCourse:
    return AROUND_TUNED if settings.fine_tune else AROUND_UNTOUCHED


def _usual_rate(adapter: Adapter, settings: FitSettings, steps: int) -> float:
    """The learning rate of an adapter, where the user names none, for so many steps an epoch."""
    slow = settings.fine_tune and steps >= TUNED_STEPS
    return min(LEARNING_RATES[adapter.name], TUNED_RATE if slow else math.inf)


def _choose_rate(
    adapter: FineTune,
    pipeline: Pipeline,
    train: WindowDataset,
    validation: WindowDataset,
    settings: FitSettings,
    stride: int,
    resume: ResumeFolder | None,
) -> tuple[float | None, History]:
    """The learning rate with the lowest validation error after one epoch, each tried on the untouched weights.

    None where the user stopped the search.
    """
    history: History = []
    errors: dict[float, float] = {}
    for rate in FINE_TUNING_RATES:
        name = f"{adapter.name}: trial of {rate:g}"
        stage = _stage(resume, name, weights=False)
        course = _train_stage(adapter, pipeline, train, validation, settings, stride, rate, stage, max_epochs=1)
        pipeline.backbone.load_state_dict(pipeline.untouched.state_dict())
        history += _named(name, course.history)
        if course.interrupted:
            return None, history
        errors[rate] = course.history[-1]["val_mse"]
    return min(errors, key=errors.__getitem__), history


def _train_stage(
    adapter: Adapter,
    pipeline: Pipeline,
    train: WindowDataset,
    validation: WindowDataset,
    settings: FitSettings,
    stride: int,
    rate: float,
    stage: Stage | None,
    max_epochs: int | None = None,
) -> KeptWeights:
    at_once = max(1, SERIES_PER_BATCH // max(adapter.series_per_window, adapter.channels))
    own = settings.batch_size // settings.devices
    accumulate = math.ceil(own / at_once)
    recompute: tuple[str, ...] = ()
    if adapter.plan is not None:
        accumulate, recompute = adapter.plan.accumulate, adapter.plan.recompute
        at_once = min(at_once, adapter.plan.micro_batch)
    data = WindowDataModule(
        train,
        validation,
        stride=stride,
        batch_size=math.ceil(own / accumulate),
        validation_batch_size=at_once,
        seed=settings.seed,
    )
    filtered = isinstance(adapter, DualWeaverAdapter) and adapter.weaver.context_filter is not None
    training = TrainingSettings(
        max_epochs=max_epochs or settings.max_epochs,
        learning_rate=rate,
        patience=_filter_course(settings).patience if filtered else PATIENCE,
        accumulate=accumulate,
        seed=settings.seed,
        verbose=settings.verbose,
        recompute=recompute,
        **processes(settings.devices),
    )
    frozen = settings.compile and not adapter.trains_backbone
    with compiled(pipeline.backbone) if frozen else nullcontext():
        return train_adapter(
            adapter,
            pipeline.backbone,
            data,
            training,
            context_length=pipeline.context_length,
            horizon=settings.horizon,
            label=adapter.name,
            stage=stage,
            references=_references(adapter, pipeline, train, settings) if adapter.needs_reference else None,
        )


def _stride(adapter: Adapter, pipeline: Pipeline, train: WindowDataset, settings: FitSettings) -> int:
    """Every so many windows are seen in an epoch."""
    context, series = pipeline.context_length, adapter.series_per_step
    wanted = epoch_windows(pipeline.backbone, context, settings.horizon, series, len(train))
    return settings.window_stride or stride_for(len(train), wanted)


def _references(adapter: Adapter, pipeline: Pipeline, train: WindowDataset, settings: FitSettings) -> Kept:
    """Where the losses with which `adapter` compares its own are kept for later fits."""
    measure = (adapter.name, adapter.native_loss, adapter.targets.tolist(), settings.compile)
    return kept_for(pipeline.backbone, train, "references", *measure, pipeline.context_length, settings.horizon)


def _stage(resume: ResumeFolder | None, name: str, *, weights: bool = True) -> Stage | None:
    return None if resume is None else resume.stage(name, weights=weights)


def _reconstruct(adapter: AdaPTS, train: Tensor, validation: Tensor, seed: int, stage: Stage | None) -> History:
    """`fit_reconstruction`, or what is kept of it."""
    kept = stage.result() if stage else None
    if kept is not None:
        adapter.load_state_dict(kept["weights"])
        return kept["history"]
    history = fit_reconstruction(adapter, train, validation, seed)
    if stage:
        stage.finish({"history": history, "weights": adapter.state_dict()})
    return history


def fit_reconstruction(adapter: AdaPTS, train: Tensor, validation: Tensor, seed: int) -> History:
    """Fit encoder and decoder to reproduce single rows, and leave them at their best validation error.

    Args:
        adapter: what is fitted.
        train, validation: rows `[time, channel]`.
        seed: of the order of rows.

    Returns:
        One row an epoch.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(adapter.parameters(), lr=RECONSTRUCTION_RATE)
    history: History = []
    best, best_epoch, weights = math.inf, 0, copy.deepcopy(adapter.state_dict())
    for epoch in range(1, RECONSTRUCTION_EPOCHS + 1):
        losses = []
        for rows in torch.randperm(len(train), generator=generator)[:RECONSTRUCTION_ROWS].split(RECONSTRUCTION_BATCH):
            loss = adapter.reconstruction_loss(train[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        with torch.no_grad():
            error = float(adapter.reconstruction_loss(validation))
        history.append(
            {
                "epoch": epoch,
                "train_loss": float(torch.stack(losses).mean()),
                "val_mse": error,
                "learning_rate": RECONSTRUCTION_RATE,
            }
        )
        if error < best:
            best, best_epoch = error, epoch
            weights = copy.deepcopy(adapter.state_dict())  # the state dict alone would follow the training
        elif epoch - best_epoch >= RECONSTRUCTION_PATIENCE:
            break
    adapter.load_state_dict(weights)
    return history


def _covered(windows: WindowDataset, first: int = 0) -> Tensor:
    """Which rows of the table lie in a window, from its step `first` on: `[time]`, bool."""
    change = torch.zeros(len(windows.values) + 1, dtype=torch.int64)
    change.index_add_(0, windows.starts + first, torch.ones_like(windows.starts))
    change.index_add_(0, windows.starts + windows.length, -torch.ones_like(windows.starts))
    return change.cumsum(0)[:-1] > 0


def _named(stage: str, rows: History) -> History:
    return [{"stage": stage, **row} for row in rows]
