"""Training one adapter: what it leaves behind, in good times and bad."""

from __future__ import annotations

import signal
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from toy_backbones import LinearToy, NormalisedToy

from dualweaver.adapters import Adapter, DualWeaverAdapter, FineTune, make_adapter
from dualweaver.backbones import Backbone, ModuleBackbone
from dualweaver.data.module import PhasedSampler, WindowDataModule
from dualweaver.data.windows import WindowDataset, window_starts
from dualweaver.fit.callbacks import KeptWeights
from dualweaver.fit.module import TrainingSettings
from dualweaver.fit.training import train_adapter
from dualweaver.method.weaver import SCALE_FLOOR

pytestmark = pytest.mark.usefixtures("one_thread")

CONTEXT, HORIZON, CHANNELS = 12, 4, 3


def windows(rows: int, seed: int = 0) -> WindowDataset:
    steps = torch.arange(rows)[:, None] / 4 + torch.arange(CHANNELS)
    noise = torch.randn(rows, CHANNELS, generator=torch.Generator().manual_seed(seed))
    length = CONTEXT + HORIZON
    return WindowDataset(torch.sin(steps) + 0.1 * noise, window_starts([rows], length), length)


def data(**settings: Any) -> WindowDataModule:
    return WindowDataModule(windows(160), windows(60, seed=1), **{"batch_size": 16, **settings})


def train(adapter: Adapter, backbone: Backbone, loaded: WindowDataModule | None = None, **settings: Any) -> KeptWeights:
    return train_adapter(
        adapter,
        backbone,
        loaded or data(),
        TrainingSettings(**{"max_epochs": 4, **settings}),
        context_length=CONTEXT,
        horizon=HORIZON,
    )


def weaver(**settings: Any) -> DualWeaverAdapter:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return DualWeaverAdapter(CHANNELS, range(CHANNELS), **settings)


def validation_error(adapter: Adapter, backbone: Backbone) -> float:
    held_out = windows(60, seed=1)
    batch = held_out.__getitems__(range(len(held_out)))
    with torch.no_grad():
        forecast = adapter.eval()(backbone, batch[:, :CONTEXT], HORIZON)
    return float((forecast - batch[:, CONTEXT:]).square().mean())


@pytest.mark.parametrize("name", ["dualweaver", "adapts", "fine-tune"])
def test_training_ends_at_the_best_validation_error_it_has_reported(name: str) -> None:
    adapter, backbone = make_adapter(name, CHANNELS, range(CHANNELS)), NormalisedToy()
    untrained = validation_error(adapter, backbone)
    course = train(adapter, backbone, learning_rate=0.02)
    errors = [row["val_mse"] for row in course.history]
    assert errors[0] == pytest.approx(untrained, rel=1e-5)
    assert course.error == min(errors) < errors[0]
    assert validation_error(adapter, backbone) == pytest.approx(course.error, rel=1e-5)
    assert [row["epoch"] for row in course.history] == list(range(len(errors)))
    assert all({"train_loss", "learning_rate"} <= row.keys() for row in course.history[1:])


def test_training_that_only_does_harm_leaves_the_weights_as_they_were() -> None:
    class Worsens(DualWeaverAdapter):
        def objective(self, *args: Any) -> Tensor:
            return -super().objective(*args)

    torch.manual_seed(0)
    adapter = Worsens(CHANNELS, range(CHANNELS))
    before = {name: weights.clone() for name, weights in adapter.state_dict().items()}
    course = train(adapter, NormalisedToy())
    assert course.epoch == 0
    assert len(course.history) > 1
    for name, weights in adapter.state_dict().items():
        torch.testing.assert_close(weights, before[name], rtol=0, atol=0)


def test_training_stops_after_so_many_epochs_without_a_better_one() -> None:
    course = train(weaver(), NormalisedToy(), max_epochs=50, patience=2, learning_rate=100.0)
    errors = [row["val_mse"] for row in course.history[1:]]
    assert len(errors) == int(np.argmin(errors)) + 1 + 2


def test_without_patience_all_epochs_are_trained_and_the_last_is_kept() -> None:
    adapter, backbone = weaver(), NormalisedToy()
    course = train(adapter, backbone, max_epochs=6, patience=None, learning_rate=100.0)
    errors = [row["val_mse"] for row in course.history]
    assert len(errors) == 1 + 6
    assert course.epoch == 6
    assert course.error == errors[-1] > min(errors)
    assert validation_error(adapter, backbone) == pytest.approx(errors[-1], rel=1e-5)


@pytest.mark.parametrize("objective", ["reconstruction", "paper"])
def test_a_frozen_backbone_is_not_touched_by_training(objective: str) -> None:
    backbone = NormalisedToy()
    before = backbone.fingerprint()
    train(weaver(objective=objective), backbone)
    assert backbone.fingerprint() == before
    assert not any(weights.requires_grad or weights.grad is not None for weights in backbone.parameters())


def test_a_fine_tuned_backbone_is_frozen_afterwards() -> None:
    backbone = NormalisedToy()
    before = backbone.fingerprint()
    train(FineTune(CHANNELS, range(CHANNELS)), backbone, learning_rate=0.02)
    assert backbone.fingerprint() != before
    assert not any(weights.requires_grad for weights in backbone.parameters())
    assert not backbone.train().training


def test_a_backbone_is_frozen_again_after_an_error() -> None:
    class Breaks(FineTune):
        def objective(self, *args: Any) -> Tensor:
            raise RuntimeError("no luck")

    backbone = NormalisedToy()
    with pytest.raises(RuntimeError, match="no luck"):
        train(Breaks(CHANNELS, range(CHANNELS)), backbone)
    assert not any(weights.requires_grad for weights in backbone.parameters())
    assert not backbone.training


def test_ctrl_c_keeps_the_best_weights_so_far() -> None:
    class Interrupted(DualWeaverAdapter):
        steps = 0

        def objective(self, *args: Any) -> Tensor:
            self.steps += 1
            if self.steps == 25:  # in the third epoch of ten steps
                signal.raise_signal(signal.SIGINT)
                time.sleep(0.01)
            return super().objective(*args)

    adapter, backbone = Interrupted(CHANNELS, range(CHANNELS)), NormalisedToy()
    handler = signal.getsignal(signal.SIGINT)
    with pytest.warns(UserWarning, match="interrupted; the best weights so far"):
        course = train(adapter, backbone, learning_rate=0.02, max_epochs=10)
    assert course.interrupted
    assert len(course.history) < 10
    assert validation_error(adapter, backbone) == pytest.approx(course.error, rel=1e-5)
    assert signal.getsignal(signal.SIGINT) is handler


def test_the_same_seed_trains_the_same_bits_and_leaves_the_callers_random_numbers_alone() -> None:
    def trained(seed: int) -> Tensor:
        adapter = weaver()
        train(adapter, NormalisedToy(), data(seed=seed), seed=seed)
        return nn.utils.parameters_to_vector(adapter.parameters()).detach()

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = trained(0)
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)
    torch.testing.assert_close(trained(0), first, rtol=0, atol=0)
    assert not torch.equal(trained(1), first)


@pytest.mark.parametrize("settings", [{"objective": "paper"}, {"regularisation": 0.5}])
def test_the_error_of_the_untouched_backbone_is_computed_once_a_window(settings: dict[str, Any]) -> None:
    class Counting(DualWeaverAdapter):
        scored = 0

        def reference_loss(self, backbone: Backbone, window: Tensor, *args: Any) -> Tensor:
            self.scored += len(window)
            return super().reference_loss(backbone, window, *args)

    adapter, loaded = Counting(CHANNELS, range(CHANNELS), **settings), data()
    course = train(adapter, NormalisedToy(), loaded)
    assert len(course.history) > 2
    assert adapter.scored == len(loaded.train_windows)


def test_a_reference_kept_by_position_equals_a_fresh_one() -> None:
    """Two windows that share a position, or a position that drifts with the phase of the stride, would show here."""
    seen: list[tuple[Tensor, Tensor]] = []

    class Spy(DualWeaverAdapter):
        def objective(self, backbone: Backbone, window: Tensor, context: int, horizon: int, reference: Any) -> Tensor:
            seen.append((reference, self.reference_loss(backbone, window, context, horizon)))
            return super().objective(backbone, window, context, horizon, reference)

    train(Spy(CHANNELS, range(CHANNELS), objective="paper"), NormalisedToy(), data(stride=3))
    assert len(seen) > 10
    for kept, fresh in seen:
        torch.testing.assert_close(kept, fresh)


@pytest.mark.parametrize("rows", [79, 80, 81])
def test_every_epoch_is_validated_however_many_windows_its_phase_has(rows: int) -> None:
    """64 to 66 windows: with a stride of two, the second batch of 32 would come in some epochs only."""
    loaded = WindowDataModule(windows(rows), windows(60, seed=1), batch_size=32, stride=2)
    course = train(weaver(), NormalisedToy(), loaded, max_epochs=3)
    assert [row["epoch"] for row in course.history] == [0, 1, 2, 3]


@pytest.mark.parametrize(("windows", "stride"), [(10, 1), (10, 3), (11, 4), (3, 5)])
def test_the_phases_of_the_stride_see_every_window_but_a_few_of_the_oldest(windows: int, stride: int) -> None:
    sampler = PhasedSampler(windows, stride, seed=1)
    epochs = []
    for epoch in range(min(stride, windows)):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
    seen = sorted(position for epoch in epochs for position in epoch)
    assert {len(epoch) for epoch in epochs} == {len(sampler)}
    assert seen == list(range(windows % min(stride, windows), windows))


def test_scales_stay_positive_although_every_step_pushes_them_down() -> None:
    class Sinks(DualWeaverAdapter):
        """Its loss falls without end as the scales do: which way a step goes hangs on no rounding."""

        def objective(self, *args: Any) -> Tensor:
            return 0 * super().objective(*args) + self.weaver.a.sum() + self.weaver.b.sum()

    lowest: list[float] = []

    class Spy(LinearToy):
        def native(self, context: Tensor) -> Tensor:
            lowest.append(torch.stack([adapter.weaver.a, adapter.weaver.b]).min().item())
            return super().native(context)

    adapter = Sinks(CHANNELS, range(CHANNELS))
    train(adapter, Spy(), learning_rate=1.0)
    assert min(lowest) == pytest.approx(SCALE_FLOOR)
    assert max(lowest) > SCALE_FLOOR


def test_accumulated_batches_step_as_one_large_batch() -> None:
    """Up to the order of additions, where the batches are of one size and nothing is dropped out."""
    trained = []
    for batch_size, accumulate in ((16, 1), (4, 4)):
        adapter, module = weaver(dropout=0.0), nn.Sequential(nn.Linear(CONTEXT, HORIZON), nn.Tanh())
        for weights in module.parameters():
            nn.init.constant_(weights, 0.1)
        loaded = WindowDataModule(windows(79), windows(60, seed=1), batch_size=batch_size)
        backbone = ModuleBackbone(module, context_length=CONTEXT)
        train(adapter, backbone, loaded, accumulate=accumulate, max_epochs=2)
        trained.append(nn.utils.parameters_to_vector(adapter.parameters()).detach())
    torch.testing.assert_close(trained[0], trained[1], rtol=1e-3, atol=1e-4)


def test_verbose_training_says_what_it_does_and_silent_training_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    train(weaver(), NormalisedToy())
    assert capfd.readouterr() == ("", "")
    train(weaver(), NormalisedToy(), verbose=True)
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "adapting: epoch 4/4, validation MSE 0." in printed.err
