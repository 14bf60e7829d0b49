"""AdaPTS against the recorded numbers of its reference, trained through the frozen model with gradients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from golden import MODES, Mode, assert_matches, outputs
from replay import (
    FILE,
    ReplayedSundial,
    ReplayedTimer,
    gradients,
    horizons,
    inputs,
    load_weights,
    replayed_backbone,
    window,
)
from torch import Tensor

from dualweaver.adapters import AdaPTS

pytestmark = pytest.mark.usefixtures("one_thread")

FOLDERS = ("adapts_timer_a", "adapts_timer_b", "adapts_sundial_a")


def recorded_adapter(name: str, mode: Mode, channels: int) -> AdaPTS:
    adapter = AdaPTS(channels, range(channels))
    load_weights(adapter, name, mode)
    return adapter


def with_gradients(adapter: AdaPTS, case: str, loss: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield f"{case}.loss", loss
    for key, gradient in gradients(adapter, loss).items():
        yield f"{case}.grad.{key}", gradient


def computed(name: str, mode: Mode) -> Iterator[tuple[str, Tensor]]:
    given = inputs(name, mode)
    context, channels = given["batch_x"].shape[1:]
    backbone, adapter = replayed_backbone(name, mode, context), recorded_adapter(name, mode, channels)
    whole = window(given, backbone)
    known = whole.shape[1] - context  # steps ahead that the recorded labels hold
    if isinstance(backbone, ReplayedSundial):
        backbone.noise = [given["noise__eval__0"]]
        yield "eval", adapter(backbone, given["batch_x"], 96)
        backbone.noise = [given["noise__train__0"]]
        yield from with_gradients(adapter, "train", adapter.objective(backbone, whole, context, known, None))
        return
    assert isinstance(backbone, ReplayedTimer)
    for horizon in horizons(name, mode, r"eval_p(\d+)"):
        yield f"eval_p{horizon}", adapter(backbone, given["batch_x"], horizon)
    for horizon in horizons(name, mode, r"train_p(\d+)\.loss"):
        backbone.generated = horizon
        loss = adapter.objective(backbone, whole, context, known, None)
        yield from with_gradients(adapter, f"train_p{horizon}", loss)
    yield from with_gradients(adapter, "fit_reconstruction", adapter.reconstruction_loss(given["batch_x"]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FOLDERS)
def test_losses_gradients_and_forecasts_match_the_reference(name: str, mode: Mode) -> None:
    ours = dict(computed(name, mode))
    assert outputs(name, FILE, mode) == set(ours)
    for output, value in ours.items():
        assert_matches(output, value, name, mode, FILE)
