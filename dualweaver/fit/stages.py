"""What a fit trains, and in which order: fine-tuning, the first phase of AdaPTS, the adapter."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd

from dualweaver.adapters import Adapter, AdaPTS, DualWeaverAdapter, FineTune, Joint, ZeroShot
from dualweaver.compute.compilation import compiled
from dualweaver.compute.limits import processes
from dualweaver.data.module import WindowDataModule, stride_for
from dualweaver.data.windows import WindowDataset
from dualweaver.fit.cache import Kept, kept_for
from dualweaver.fit.callbacks import KeptWeights
from dualweaver.fit.effort import epoch_windows
from dualweaver.fit.module import TrainingSettings
from dualweaver.fit.reconstruction import covered_rows, fit_reconstruction
from dualweaver.fit.resume import ResumeFolder, Stage
from dualweaver.fit.selection import choose_share, lowest
from dualweaver.fit.training import train_adapter
from dualweaver.forecast.pipeline import Pipeline
from dualweaver.method import FILTER_STRENGTH
from dualweaver.settings import FitSettings

__all__ = ["Stages", "make_stages"]

SERIES_PER_BATCH = 2048  # series that carry gradients at once; wider batches are accumulated

LEARNING_RATES = {"dualweaver": 3e-3, "adapts": 1e-3}
# Around a fine-tuned backbone, which has left less to learn; a few steps at that rate would get nowhere.
TUNED_RATE, TUNED_STEPS = 1e-3, 16
PATIENCE = 3  # epochs without a better validation error, after which training stops
TUNED_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
FINE_TUNING_RATES = (1e-5, 1e-4, 1e-3)  # each is tried for one epoch, where the user names none


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
    """What is trained in turn to end with `adapter`; nothing for zero-shot, alone or jointly."""
    if adapter.name in (Joint.name, ZeroShot.name):
        return []
    if settings.fine_tune and adapter.name != FineTune.name:
        return [FineTune(adapter.channels, adapter.targets.tolist()), adapter]
    return [adapter]


@dataclass
class Stages:
    """Trains one stage after the other; each is left at its best validation error, or its last epoch (`_FilterCourse`).

    Attributes:
        pipeline: its backbone is the one that is fine-tuned, where a stage does that.
        train: windows with the most `Adapter.future_steps` that any stage needs.
        validation: windows of context and horizon.
        settings: those of the fit.
        resume: where to keep how far training has come, and to go on from.
        place: what the names of stages begin with, where one fit has several of a kind.
        history: one row an epoch so far.
        interrupted: whether the user stopped it.
    """

    pipeline: Pipeline
    train: WindowDataset
    validation: WindowDataset
    settings: FitSettings
    resume: ResumeFolder | None = None
    place: str = ""
    history: History = dataclasses.field(default_factory=list)
    interrupted: bool = False

    def run(self, stages: Sequence[Adapter]) -> pd.DataFrame:
        """Train what `make_stages` gave for the pipeline's adapter.

        Returns:
            One row an epoch: `stage`, `epoch`, `train_loss`, `val_mse`, `learning_rate`. In "adapts: reconstruction",
            `val_mse` is the error of the rows that encoder and decoder reproduce, not that of forecasts.
        """
        for adapter in stages:
            if isinstance(adapter, AdaPTS):
                self._reconstruct(adapter)
            rate = self._rate(adapter)
            training = self._training(adapter, FINE_TUNING_RATES[0] if rate is None else rate)
            if isinstance(adapter, FineTune) and rate is None:
                training = self._with_best_rate(adapter, training)
            if self.interrupted:
                break
            trained = self._train(adapter, training, self.place + adapter.name)
            if self.interrupted:
                break
            if isinstance(adapter, DualWeaverAdapter) and adapter.shares and trained.epoch > 0:
                self._choose_share(adapter)
        return pd.DataFrame(self.history, columns=COLUMNS)

    def _rate(self, adapter: Adapter) -> float | None:
        """The user's for the last stage, else the adapter's own; None where trials find it."""
        if adapter is self.pipeline.adapter and self.settings.learning_rate is not None:
            return self.settings.learning_rate
        if isinstance(adapter, FineTune):
            return None
        steps = math.ceil(len(self.train) / self._stride(adapter) / self.settings.batch_size)
        slow = self.settings.fine_tune and steps >= TUNED_STEPS
        return min(LEARNING_RATES[adapter.name], TUNED_RATE if slow else math.inf)

    def _training(self, adapter: Adapter, rate: float) -> TrainingSettings:
        settings, plan = self.settings, adapter.plan
        filtered = isinstance(adapter, DualWeaverAdapter) and adapter.weaver.context_filter is not None
        return TrainingSettings(
            max_epochs=settings.max_epochs,
            learning_rate=rate,
            patience=self._course.patience if filtered else PATIENCE,
            accumulate=plan.accumulate if plan else math.ceil(self._own_batch / self._at_once(adapter)),
            seed=settings.seed,
            verbose=settings.verbose,
            recompute=plan.recompute if plan else (),
            **processes(settings.devices),
        )

    def _with_best_rate(self, adapter: FineTune, training: TrainingSettings) -> TrainingSettings:
        """The learning rate with the lowest validation error after one epoch, each tried on the untouched weights."""
        errors: dict[float, float] = {}
        for rate in FINE_TUNING_RATES:
            once = dataclasses.replace(training, learning_rate=rate, max_epochs=1)
            course = self._train(adapter, once, f"{adapter.name}: trial of {rate:g}", weights=False)
            self.pipeline.backbone.load_state_dict(self.pipeline.untouched.state_dict())
            if self.interrupted:
                return training
            errors[rate] = course.history[-1]["val_mse"]
        return dataclasses.replace(training, learning_rate=lowest(errors))

    def _train(self, adapter: Adapter, training: TrainingSettings, name: str, *, weights: bool = True) -> KeptWeights:
        """One stage; `weights` says whether its weights are kept for a fit that goes on later."""
        settings, pipeline = self.settings, self.pipeline
        data = WindowDataModule(
            self.train,
            self.validation,
            stride=self._stride(adapter),
            batch_size=math.ceil(self._own_batch / training.accumulate),
            validation_batch_size=self._at_once(adapter),
            seed=settings.seed,
        )
        frozen = settings.compile and not adapter.trains_backbone
        with compiled(pipeline.backbone) if frozen else nullcontext():
            course = train_adapter(
                adapter,
                pipeline.backbone,
                data,
                training,
                context_length=pipeline.context_length,
                horizon=settings.horizon,
                label=adapter.name,
                stage=self._stage(name, weights=weights),
                references=self._references(adapter) if adapter.needs_reference else None,
            )
        self._tell(name, course.history)
        self.interrupted = course.interrupted
        return course

    def _choose_share(self, adapter: DualWeaverAdapter) -> None:
        given = (adapter, self.pipeline.backbone, self.validation, self.pipeline.context_length, self.settings.seed)
        errors = choose_share(*given, self._course.shares, freely=self._course.freely)
        for share, error in errors.items():
            self._tell(f"{self.place}{adapter.name}: share {share:g}", [{"epoch": 0, "val_mse": error}])

    def _reconstruct(self, adapter: AdaPTS) -> None:
        """`fit_reconstruction`, or what is kept of it."""
        name = f"{adapter.name}: reconstruction"
        stage = self._stage(name)
        kept = stage.result() if stage else None
        if kept is not None:
            adapter.load_state_dict(kept["weights"])
            self._tell(name, kept["history"])
            return
        seen = self.train.values[covered_rows(self.train)]
        unseen = self.validation.values[covered_rows(self.validation, self.pipeline.context_length)]
        history = fit_reconstruction(adapter, seen, unseen, self.settings.seed)
        if stage:
            stage.finish({"history": history, "weights": adapter.state_dict()})
        self._tell(name, history)

    @property
    def _course(self) -> _FilterCourse:
        return AROUND_TUNED if self.settings.fine_tune else AROUND_UNTOUCHED

    @property
    def _own_batch(self) -> int:
        """Windows of a step that this process takes."""
        return self.settings.batch_size // self.settings.devices

    def _at_once(self, adapter: Adapter) -> int:
        """Windows that go through at once."""
        at_once = max(1, SERIES_PER_BATCH // max(adapter.series_per_window, adapter.channels))
        return at_once if adapter.plan is None else min(at_once, adapter.plan.micro_batch)

    def _stride(self, adapter: Adapter) -> int:
        """Every so many windows are seen in an epoch."""
        if self.settings.window_stride is not None:
            return self.settings.window_stride
        context, series = self.pipeline.context_length, adapter.series_per_step
        wanted = epoch_windows(self.pipeline.backbone, context, self.settings.horizon, series, len(self.train))
        return stride_for(len(self.train), wanted)

    def _references(self, adapter: Adapter) -> Kept:
        """Where the losses with which `adapter` compares its own are kept for later fits."""
        measure = (adapter.name, adapter.native_loss, adapter.targets.tolist(), self.settings.compile)
        shape = (self.pipeline.context_length, self.settings.horizon)
        return kept_for(self.pipeline.backbone, self.train, "references", *measure, *shape)

    def _stage(self, name: str, *, weights: bool = True) -> Stage | None:
        return None if self.resume is None else self.resume.stage(name, weights=weights)

    def _tell(self, stage: str, rows: History) -> None:
        self.history += [{"stage": stage, **row} for row in rows]
