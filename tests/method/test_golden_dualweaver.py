"""The method against the recorded numbers of its reference: losses, gradients, forecasts and a course of training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from golden import MODES, Mode, assert_matches, dtype_of, outputs
from replay import (
    FILE,
    Replayed,
    ReplayedSundial,
    gradients,
    horizons,
    inputs,
    load_weights,
    renamed,
    replayed_backbone,
    window,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dualweaver.adapters import DualWeaverAdapter
from dualweaver.fit.module import AdaptationModule, TrainingSettings
from dualweaver.method import Weaver

pytestmark = pytest.mark.usefixtures("one_thread")

FOLDERS = ("dw_timer_mlp", "dw_timer_cnn", "dw_timerb_mlp", "dw_sundial_mlp", "dw_sundial_cnn")
REFERENCE_HORIZON = 96  # of the untouched Sundial's loss in the reference, whatever the horizon of the surrogates'


def recorded_adapter(name: str, mode: Mode) -> DualWeaverAdapter:
    adapter = DualWeaverAdapter(5, range(5), fusion=name.rsplit("_", 1)[1], objective="paper", dropout=0.0)
    load_weights(adapter.weaver, name, mode)
    return adapter


def play(backbone: Replayed, given: dict[str, Tensor], case: str, draws: slice) -> None:
    """Hand the recorded noise of a case to a backbone that draws some."""
    if isinstance(backbone, ReplayedSundial):
        backbone.noise = [given[key] for key in sorted(given) if key.startswith(f"noise__{case}__")][draws]


def training(
    adapter: DualWeaverAdapter, backbone: Replayed, given: dict[str, Tensor], case: str, horizon: int
) -> Iterator[tuple[str, Tensor]]:
    """Everything recorded of one training step."""
    whole, context = window(given, backbone), given["batch_x"].shape[1]
    play(backbone, given, case, slice(2, 4))
    reference = adapter.reference_loss(backbone, whole, context, REFERENCE_HORIZON)
    yield f"{case}.origin_token_losses", backbone.token_losses
    play(backbone, given, case, slice(0, 2))
    loss = adapter.objective(backbone, whole, context, horizon, reference)
    losses = backbone.token_losses
    yield f"{case}.loss", loss
    yield f"{case}.surrogate_token_losses", losses
    first, second = losses.mean(dim=1).view(2, len(whole), -1)
    upper = adapter.upper_bound(first, second, backbone.loss_kind)
    yield f"{case}.re_flag", (upper < reference).to(whole)
    for key, gradient in gradients(adapter.weaver, loss).items():
        yield f"{case}.grad.{key}", gradient


class PlayedDropout(nn.Module):
    """Recorded keep-masks, one a call."""

    def __init__(self, masks: Iterator[Tensor]) -> None:
        super().__init__()
        self.masks = masks

    def forward(self, x: Tensor) -> Tensor:
        return x * next(self.masks) / 0.9


class FourMasks(Weaver):
    """The reference's trap: F is evaluated for each surrogate on its own, under a mask of its own."""

    def surrogates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a * x + self.fusion(x), self.fusion(x) - self.b * x


def with_four_masks(name: str, mode: Mode, given: dict[str, Tensor]) -> DualWeaverAdapter:
    adapter = recorded_adapter(name, mode)
    masks = iter([given[key] for key in sorted(given) if key.startswith("mask__train_p96_dropout__")])
    for layer, module in list(adapter.weaver.fusion.named_children()):
        if isinstance(module, nn.Dropout | nn.Dropout1d):
            setattr(adapter.weaver.fusion, layer, PlayedDropout(masks))
    weaver = FourMasks(adapter.weaver.fusion, range(5)).to(dtype_of(mode))
    weaver.load_state_dict(adapter.weaver.state_dict())
    adapter.weaver = weaver
    return adapter


def computed(name: str, mode: Mode) -> Iterator[tuple[str, Tensor]]:
    given = inputs(name, mode)
    backbone = replayed_backbone(name, mode, given["batch_x"].shape[1])
    adapter = recorded_adapter(name, mode)
    with torch.no_grad():
        yield "weaver_eval(batch_x)", adapter.weaver.fusion(given["batch_x"])
        for horizon in horizons(name, mode, r"eval_p(\d+)"):
            play(backbone, given, f"eval_p{horizon}", slice(None))
            yield f"eval_p{horizon}", adapter(backbone, given["batch_x"], horizon)
    for horizon in horizons(name, mode, r"train_p(\d+)\.loss"):
        yield from training(adapter, backbone, given, f"train_p{horizon}", horizon)
    if horizons(name, mode, r"train_p(\d+)_dropout\.loss"):
        yield from training(with_four_masks(name, mode, given), backbone, given, "train_p96_dropout", 96)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FOLDERS)
def test_losses_gradients_and_forecasts_match_the_reference(name: str, mode: Mode) -> None:
    ours = dict(computed(name, mode))
    assert {output for output in outputs(name, FILE, mode) if not output.startswith("traj.")} == set(ours)
    for output, value in ours.items():
        flat = value.flatten() if output.endswith("token_losses") and "sundial" in name else value
        assert_matches(output, flat, name, mode, FILE)


class Course(L.Callback):
    """What the reference recorded of a course of training."""

    def __init__(self, weaver: Weaver, accumulate: int) -> None:
        self.weaver, self.accumulate = weaver, accumulate
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []
        self.rates: list[float] = []
        self.parameters: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *args: Any) -> None:
        self.losses.append(outputs["loss"] * self.accumulate)  # Lightning hands on the loss divided by the group

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: torch.optim.Optimizer) -> None:
        self.norms.append(nn.utils.get_total_norm([weights.grad for weights in self.weaver.parameters()]))  # type: ignore[misc]
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for key, weights in self.weaver.named_parameters():
            name = f"traj.epoch{trainer.current_epoch + 1}.param.{renamed(key)}"
            self.parameters[name] = weights.detach().clone()


@pytest.mark.parametrize("mode", MODES)
def test_two_epochs_of_the_lightning_module_match_the_reference(mode: Mode) -> None:
    name = "dw_timer_mlp"
    given, adapter = inputs(name, mode), recorded_adapter(name, mode)
    batches = [(torch.arange(4) + 4 * batch, given[f"traj_series_{batch}"]) for batch in range(5)]
    settings = TrainingSettings(max_epochs=3, learning_rate=1e-2, accumulate=2)  # the cosine is made for three epochs
    module = AdaptationModule(
        adapter, replayed_backbone(name, mode, 672), settings, context_length=672, horizon=96, windows=20
    )
    course = Course(adapter.weaver, settings.accumulate)
    trainer = L.Trainer(
        max_epochs=2,
        precision="64-true" if mode == "f64" else "32-true",
        accumulate_grad_batches=settings.accumulate,
        gradient_clip_val=settings.gradient_clip,
        callbacks=[course],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    ours = {
        "traj.microbatch_losses": torch.stack(course.losses),
        "traj.grad_norms_before_clip": torch.stack(course.norms),
        "traj.lrs": torch.tensor(course.rates, dtype=dtype_of(mode)),
        **course.parameters,
    }
    assert {output for output in outputs(name, FILE, mode) if output.startswith("traj.")} == set(ours)
    for output, value in ours.items():
        assert_matches(output, value, name, mode, FILE)
