"""Training any adapter around a frozen (or thawed) backbone with Lightning."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import MeanSquaredError

from dualweaver.adapters import Adapter
from dualweaver.allocator import keep_freed_memory
from dualweaver.backbones import Backbone
from dualweaver.backbones.recompute import recomputing
from dualweaver.cache import Kept
from dualweaver.data.module import WindowDataModule
from dualweaver.interrupt import StopOnInterrupt
from dualweaver.notices import notify
from dualweaver.resume import SaveEpochs, Stage
from dualweaver.seeding import seeded

__all__ = ["AdaptationModule", "KeptWeights", "TrainingSettings", "train_adapter"]


@dataclass(frozen=True)
class TrainingSettings:
    """How long and how fast.

    Attributes:
        max_epochs: epochs at most.
        learning_rate: of AdamW, decayed to zero by a cosine over `max_epochs`, epoch by epoch.
        weight_decay, betas: of AdamW.
        patience: epochs without a better validation error after which training stops; its best epoch is kept. With None
            all epochs are trained, and the last is kept unless the user stops before.
        gradient_clip: largest norm of the gradient.
        accumulate: batches whose gradients are averaged before a step.
        seed: governs initial weights, order and dropout.
        verbose: show a progress bar.
        devices, nodes, strategy: as Lightning takes them, see `docs/scaling.md`; with several processes a step averages
            their batches, and its result is that of one process which accumulates as many.
        recompute: parts of the backbone that the backward pass computes again.
    """

    max_epochs: int = 10
    learning_rate: float = 1e-2
    weight_decay: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    patience: int | None = 3
    gradient_clip: float = 1.0
    accumulate: int = 1
    seed: int = 0
    verbose: bool = False
    devices: int = 1
    nodes: int = 1
    strategy: str = "auto"
    recompute: tuple[str, ...] = ()


class AdaptationModule(L.LightningModule):
    """One adapter and one backbone; logs `train_loss` and `val_mse` an epoch.

    Args:
        adapter: what is trained.
        backbone: frozen, unless the adapter trains it.
        settings: of the optimizer.
        context_length: steps of each window that are context.
        horizon: steps to forecast. Training windows may hold more, see `Adapter.future_steps`.
        windows: how many training windows there are; their reference losses are kept by position.
    """

    def __init__(
        self,
        adapter: Adapter,
        backbone: Backbone,
        settings: TrainingSettings,
        *,
        context_length: int,
        horizon: int,
        windows: int,
    ) -> None:
        super().__init__()
        self.adapter, self.backbone, self.settings = adapter, backbone, settings
        self.context_length, self.horizon = context_length, horizon
        targets = len(adapter.targets)
        self.val_mse = MeanSquaredError(num_outputs=targets)
        # constants of the windows and the frozen model: each is computed once, when training first sees its window
        self.register_buffer("references", torch.full((windows if adapter.needs_reference else 0, targets), torch.nan))
        # of several processes, each has the frozen weights already, and references of its own windows
        alone = ["references", *self._frozen()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, alone)

    references: Tensor

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # dropout and sampled losses depend on seed and batch alone, so that a resumed training draws them again
        batch = self.trainer.fit_loop.total_batch_idx * self.trainer.world_size + self.trainer.global_rank
        torch.manual_seed(self.settings.seed * 1_000_003 + batch)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        positions, window = batch
        reference = self._reference(positions, window) if self.adapter.needs_reference else None
        loss = self.adapter.objective(self.backbone, window, self.context_length, self.horizon, reference)
        several = self.trainer.world_size > 1
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=len(window), sync_dist=several)
        return loss

    def _reference(self, positions: Tensor, window: Tensor) -> Tensor:
        unknown = self.references[positions, 0].isnan()
        if unknown.any():
            fresh = self.adapter.reference_loss(self.backbone, window[unknown], self.context_length, self.horizon)
            self.references[positions[unknown]] = fresh
        return self.references[positions]

    def validation_step(self, window: Tensor, batch_idx: int) -> None:
        forecast = self.adapter(self.backbone, window[:, : self.context_length], self.horizon)
        own = window[:, self.context_length :].index_select(-1, self.adapter.targets)
        self.val_mse.update(forecast.flatten(0, 1), own.flatten(0, 1))

    def on_validation_epoch_end(self) -> None:
        self.log("val_mse", self.adapter.weighted_mean(self.val_mse.compute()), prog_bar=True)
        self.val_mse.reset()

    def configure_optimizers(self) -> Any:
        settings = self.settings
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(
            trained, lr=settings.learning_rate, betas=settings.betas, weight_decay=settings.weight_decay
        )
        optimizer.register_step_post_hook(lambda *_: self.adapter.project())
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=settings.max_epochs, eta_min=1e-8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "epoch"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for name in self._frozen():
            del checkpoint["state_dict"][name]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"].update(self._frozen())

    def _frozen(self) -> dict[str, Tensor]:
        """What a checkpoint does not hold: the backbone, unless it is trained."""
        return {} if self.adapter.trains_backbone else self.backbone.state_dict(prefix="backbone.")


class KeptWeights(Callback):
    """Keeps what was trained at its best validation error, or what it is told to `take`, and the course of training.

    Attributes:
        epoch: of what is kept, from 1; 0 is before training.
        error: its `val_mse`.
        history: one row an epoch.
        interrupted: whether the user stopped training.
    """

    interrupted = False

    def __init__(self) -> None:
        self.error, self.epoch = float("inf"), 0
        self.history: list[dict[str, float]] = []
        self._weights: dict[str, Tensor] = {}
        self._rate = float("nan")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # before training nothing has been learned yet: the sanity pass scores the untrained adapter
        epoch = 0 if trainer.sanity_checking else trainer.current_epoch + 1
        value = float(trainer.callback_metrics["val_mse"])
        self.history.append({"epoch": epoch, "val_mse": value})
        if value < self.error:
            self.take(pl_module)

    def take(self, module: L.LightningModule) -> None:
        """Keep the weights of the epoch that was validated last, which `module` has now, whatever their error."""
        self.error, self.epoch = self.history[-1]["val_mse"], int(self.history[-1]["epoch"])
        self._weights = {name: tensor.detach().clone() for name, tensor in _trained(module).items()}

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._rate = trainer.optimizers[0].param_groups[0]["lr"]  # at the end the schedule has moved on already

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        row = self.history[-1]  # validation ran inside of this epoch
        row["train_loss"] = float(trainer.callback_metrics["train_loss"])
        row["learning_rate"] = self._rate

    def state_dict(self) -> dict[str, Any]:
        return {"error": self.error, "epoch": self.epoch, "history": self.history, "weights": self._weights}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.error, self.epoch = state_dict["error"], state_dict["epoch"]
        self.history, self._weights = state_dict["history"], state_dict["weights"]

    def restore(self, module: L.LightningModule) -> None:
        """Put the kept weights back."""
        with torch.no_grad():
            for name, tensor in _trained(module).items():
                if name in self._weights:
                    tensor.copy_(self._weights[name])


def _trained(module: L.LightningModule) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


class ProgressReport(Callback):
    """One bar over all epochs that says what is being trained and how well it does."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self.task: TaskID | None = None
        self.best = float("inf")

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.bar.start()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if self.task is None:
            steps = int(trainer.num_training_batches) * (trainer.max_epochs or 1)
            self.task = self.bar.add_task(self.label, total=steps, completed=trainer.fit_loop.total_batch_idx)
            self._describe(trainer)
        self.bar.advance(self.task)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.best = min(self.best, float(trainer.callback_metrics["val_mse"]))
        self._describe(trainer)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.task is not None:  # stopping early leaves no bar that looks unfinished
            self.bar.update(self.task, completed=self.bar.tasks[0].total)
        self.bar.stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.bar.stop()

    def _describe(self, trainer: L.Trainer) -> None:
        if self.task is not None:
            epoch = f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}"
            self.bar.update(self.task, description=f"{self.label}: {epoch}, validation MSE {self.best:.4f}")


def train_adapter(
    adapter: Adapter,
    backbone: Backbone,
    data: WindowDataModule,
    settings: TrainingSettings,
    *,
    context_length: int,
    horizon: int,
    label: str = "adapting",
    stage: Stage | None = None,
    references: Kept | None = None,
) -> KeptWeights:
    """Train an adapter, and leave it (and a thawed backbone) at its best validation error, or as it was last.

    `settings.patience` says which. The untrained adapter is scored first and counts as a candidate for the best. The
    backbone is frozen afterwards, whatever happens, and stays on its device. Ctrl-C ends training after the batch at
    hand, with a notice; another error passes through, with the weights where they were when it occurred. With `stage`,
    training goes on where an earlier process left it, and is not repeated where that had finished. `references` keeps
    the untouched backbone's losses for later fits.

    Returns:
        The course of training.
    """
    module = AdaptationModule(
        adapter,
        backbone,
        settings,
        context_length=context_length,
        horizon=horizon,
        windows=len(data.train_windows),
    )
    if references and (known := references.read()):
        module.references.copy_(known["losses"])
    unknown = int(module.references.isnan().sum())
    course, stop = KeptWeights(), StopOnInterrupt(verbose=settings.verbose)
    callbacks: list[Callback] = [course, stop]
    if settings.patience is not None:
        callbacks.append(EarlyStopping("val_mse", patience=settings.patience, mode="min"))
    if settings.verbose:
        callbacks.append(ProgressReport(label))
    kept, start = (stage.result(), stage.newest()) if stage else (None, None)
    if stage:
        callbacks.append(SaveEpochs(stage))
    thawed = backbone.unfrozen() if adapter.trains_backbone else nullcontext()
    again = recomputing(backbone, settings.recompute)
    device = next(chain(backbone.parameters(), adapter.buffers())).device
    with seeded(settings.seed), _quiet(), thawed, again, stop.listening(), keep_freed_memory():
        if kept is not None:
            course.load_state_dict(kept)
        else:
            trainer = L.Trainer(
                max_epochs=settings.max_epochs,
                accumulate_grad_batches=settings.accumulate,
                gradient_clip_val=settings.gradient_clip,
                callbacks=callbacks,
                plugins=stage,
                logger=False,
                enable_checkpointing=stage is not None,
                enable_model_summary=False,
                enable_progress_bar=False,
                # all of validation: scores the untrained adapter, which a checkpoint holds already
                num_sanity_val_steps=0 if start else -1,
                accelerator="auto",
                devices=settings.devices,
                num_nodes=settings.nodes,
                strategy=settings.strategy,
                use_distributed_sampler=False,  # the data know their process
            )
            trainer.fit(module, datamodule=data, ckpt_path=start)
            if references and trainer.is_global_zero and int(module.references.isnan().sum()) < unknown:
                references.write({"losses": module.references})
            if settings.patience is None and not stop.asked:
                course.take(module)
        course.restore(module)
        module.to(device)
    if stop.asked:
        course.interrupted = True
        notify(f"{label}: interrupted; the best weights so far (epoch {course.epoch}) are kept")
    elif stage and kept is None:
        stage.finish(course.state_dict())
    return course


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Lightning's hints, which speak to those who wrote the training script."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "lightning")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning")
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
