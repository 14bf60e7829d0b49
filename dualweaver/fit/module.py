"""What one step of training and one of validation are, as a Lightning module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import MeanSquaredError

from dualweaver.adapters import Adapter
from dualweaver.backbones import Backbone

__all__ = ["AdaptationModule", "TrainingSettings"]


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
