"""What watches training: the weights that are kept, and the progress bar."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from torch import Tensor

__all__ = ["KeptWeights", "ProgressReport"]


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
