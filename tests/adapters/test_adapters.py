"""What every adapter must do, whichever it is."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy_backbones import LinearToy, NormalisedToy, TogetherToy

from dualweaver.adapters import ADAPTERS, Adapter, AdaPTS, DualWeaverAdapter, FineTune, make_adapter
from dualweaver.backbones import Backbone, ModuleBackbone
from dualweaver.errors import SettingError

pytestmark = pytest.mark.usefixtures("one_thread")

CONTEXT, HORIZON, CHANNELS, TARGETS = 12, 4, 7, [5, 2]
LEVELS = (0.1, 0.5, 0.9)

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mlp": ("dualweaver", {}),
    "cnn": ("dualweaver", {"fusion": "cnn"}),
    "mlp-regularised": ("dualweaver", {"regularisation": 0.5}),
    "mlp-paper": ("dualweaver", {"objective": "paper"}),
    "cnn-paper": ("dualweaver", {"fusion": "cnn", "objective": "paper"}),
    "adapts": ("adapts", {}),
    "fine-tune": ("fine-tune", {}),
    "zero-shot": ("zero-shot", {}),
}
TRAINED = [kind for kind in KINDS if kind != "zero-shot"]


def make(kind: str, targets: list[int] = TARGETS, *, trained: bool = True) -> Adapter:
    """An adapter; `trained` moves its weights away from where they start."""
    name, settings = KINDS[kind]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        adapter = make_adapter(name, CHANNELS, targets, **settings)
        if trained:
            for weights in adapter.parameters():
                nn.init.uniform_(weights, 0.1, 0.6)
    return adapter.eval()


@pytest.fixture
def windows() -> Tensor:
    """`[window, context + horizon, channel]`."""
    return torch.randn(6, CONTEXT + HORIZON, CHANNELS, generator=torch.Generator().manual_seed(1)).cumsum(dim=1)


def optimise(adapter: Adapter, backbone: Backbone, windows: Tensor, steps: int) -> dict[str, float]:
    """Largest gradient that each trainable weight has seen in a few steps of training."""
    adapter.train()
    weights = {**dict(adapter.named_parameters()), **dict(backbone.named_parameters(prefix="backbone"))}
    weights = {name: weight for name, weight in weights.items() if weight.requires_grad}
    optimizer = torch.optim.SGD(weights.values(), lr=1e-2)
    largest = dict.fromkeys(weights, 0.0)
    for _ in range(steps):
        reference = adapter.reference_loss(backbone, windows, CONTEXT, HORIZON) if adapter.needs_reference else None
        optimizer.zero_grad()
        adapter.objective(backbone, windows, CONTEXT, HORIZON, reference).backward()
        for name, weight in weights.items():
            if weight.grad is not None:
                largest[name] = max(largest[name], float(weight.grad.abs().max()))
        optimizer.step()
        adapter.project()
    adapter.eval()
    return largest


def test_every_adapter_is_in_the_suite() -> None:
    assert {name for name, _ in KINDS.values()} == set(ADAPTERS) - {"joint"}  # which no univariate toy can do


@pytest.mark.parametrize("levels", [(), (0.1, 0.5, 0.9)], ids=["points", "quantiles"])
def test_the_joint_adapter_gives_the_targets_of_what_a_backbone_makes_of_all_channels(
    levels: tuple[float, ...],
) -> None:
    backbone = TogetherToy(CONTEXT, HORIZON, levels=levels)
    windows = torch.randn(6, CONTEXT, CHANNELS, generator=torch.Generator().manual_seed(0))
    adapter = make_adapter("joint", CHANNELS, [2, 0])
    forecast = adapter.distribution(backbone, windows, HORIZON)
    for place, channel in enumerate((2, 0)):
        mixed = windows[..., channel] + windows.mean(dim=2)
        expected = backbone.forecast(mixed, HORIZON)
        torch.testing.assert_close(forecast.mean[..., place], expected.mean)
        if levels:
            assert forecast.quantiles is not None
            torch.testing.assert_close(forecast.quantiles[:, :, place], expected.quantiles)
    assert torch.equal(adapter(backbone, windows, HORIZON), forecast.mean)
    assert adapter.series_per_window == CHANNELS
    with pytest.raises(SettingError, match="'normalised-toy' takes one series at a time"):
        adapter(NormalisedToy(CONTEXT, HORIZON), windows, HORIZON)
    with pytest.raises(SettingError, match="nothing to train"):
        adapter.objective(backbone, windows, CONTEXT, HORIZON, None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_becomes_as_many_series_as_stated(kind: str, windows: Tensor) -> None:
    adapter = make(kind)
    series = adapter.encode(windows[:, :CONTEXT])
    assert series.shape == (len(windows) * adapter.series_per_window, CONTEXT)


def test_one_target_of_seven_channels_costs_two_series() -> None:
    costs = {kind: make(kind, [3]).series_per_window for kind in ("mlp", "cnn", "adapts", "fine-tune", "zero-shot")}
    assert costs == {"mlp": 2, "cnn": 2, "adapts": 32, "fine-tune": 1, "zero-shot": 1}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("horizon", [1, HORIZON, 2 * HORIZON + 1])
def test_forecasts_hold_the_targets_only_at_any_horizon(kind: str, horizon: int, windows: Tensor) -> None:
    forecast = make(kind)(NormalisedToy(), windows[:, :CONTEXT], horizon)
    assert forecast.shape == (len(windows), horizon, len(TARGETS))


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_is_forecast_alike_alone_and_in_a_batch(kind: str, windows: Tensor) -> None:
    adapter, backbone = make(kind), NormalisedToy(levels=LEVELS)
    together = adapter.distribution(backbone, windows[:, :CONTEXT], HORIZON)
    for position in (0, len(windows) - 1):
        alone = adapter.distribution(backbone, windows[position : position + 1, :CONTEXT], HORIZON)
        torch.testing.assert_close(alone.mean[0], together.mean[position], rtol=1e-5, atol=1e-5)
        if together.quantiles is not None and alone.quantiles is not None:
            torch.testing.assert_close(alone.quantiles[0], together.quantiles[position], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_targets_come_in_the_order_asked_for(kind: str, windows: Tensor) -> None:
    if kind == "adapts":
        pytest.skip("its decoder has an output for each target and no copy of any channel")
    forward, backward = make(kind, [5, 2], trained=False), make(kind, [2, 5], trained=False)
    backbone = NormalisedToy()
    torch.testing.assert_close(
        forward(backbone, windows[:, :CONTEXT], HORIZON), backward(backbone, windows[:, :CONTEXT], HORIZON).flip(-1)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_quantiles_are_sorted_or_absent(kind: str, windows: Tensor) -> None:
    context = windows[:, :CONTEXT]
    forecast = make(kind).distribution(NormalisedToy(levels=LEVELS), context, HORIZON)
    if kind == "adapts":
        assert (forecast.quantiles, forecast.levels) == (None, ())
    else:
        assert forecast.quantiles is not None
        assert forecast.levels == LEVELS
        assert forecast.quantiles.shape == (len(windows), HORIZON, len(TARGETS), len(LEVELS))
        assert (forecast.quantiles.diff(dim=-1) >= 0).all()
    point = make(kind).distribution(NormalisedToy(), context, HORIZON)
    assert (point.quantiles, point.levels) == (None, ())


@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_of_the_distribution_is_the_point_forecast(kind: str, windows: Tensor) -> None:
    adapter, backbone = make(kind), NormalisedToy(levels=LEVELS)
    distribution = adapter.distribution(backbone, windows[:, :CONTEXT], HORIZON)
    torch.testing.assert_close(distribution.mean, adapter(backbone, windows[:, :CONTEXT], HORIZON))


@pytest.mark.parametrize("kind", KINDS)
def test_forecasts_repeat_bit_by_bit_outside_of_training(kind: str, windows: Tensor) -> None:
    adapter, backbone = make(kind), NormalisedToy()
    first, second = (adapter(backbone, windows[:, :CONTEXT], HORIZON) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_carries_everything_that_was_trained(kind: str, windows: Tensor) -> None:
    trained, fresh, backbone = make(kind), make(kind, trained=False), NormalisedToy()
    fresh.load_state_dict(trained.state_dict())
    context = windows[:, :CONTEXT]
    torch.testing.assert_close(fresh(backbone, context, HORIZON), trained(backbone, context, HORIZON), rtol=0, atol=0)


@pytest.mark.parametrize("kind", TRAINED)
def test_gradients_reach_every_weight_that_is_trained_within_two_steps(kind: str, windows: Tensor) -> None:
    adapter, backbone = make(kind, trained=False), NormalisedToy()
    before = backbone.fingerprint()
    if adapter.trains_backbone:
        with backbone.unfrozen():
            largest = optimise(adapter, backbone, windows, steps=2)
        assert backbone.fingerprint() != before
    else:
        largest = optimise(adapter, backbone, windows, steps=2)
        assert backbone.fingerprint() == before
        assert all(weights.grad is None for weights in backbone.parameters())
    assert largest
    assert [name for name, value in largest.items() if value == 0] == []


@pytest.mark.parametrize("kind", TRAINED)
def test_training_lowers_its_own_objective(kind: str, windows: Tensor) -> None:
    adapter, backbone = make(kind, trained=False), NormalisedToy()

    def loss() -> float:
        reference = adapter.reference_loss(backbone, windows, CONTEXT, HORIZON) if adapter.needs_reference else None
        with torch.no_grad():
            return float(adapter.objective(backbone, windows, CONTEXT, HORIZON, reference))

    before = loss()
    with backbone.unfrozen() if adapter.trains_backbone else torch.enable_grad():
        optimise(adapter, backbone, windows, steps=20)
    assert loss() < before


def test_zero_shot_refuses_to_be_trained(windows: Tensor) -> None:
    with pytest.raises(SettingError, match="nothing to train"):
        make("zero-shot").objective(LinearToy(), windows, CONTEXT, HORIZON, None)


@pytest.mark.parametrize("kind", KINDS)
def test_only_native_losses_ask_for_more_steps_than_the_horizon(kind: str) -> None:
    class LooksFurther(LinearToy):
        def label_horizon(self, horizon: int) -> int:
            return 9

    adapter, backbone = make(kind), LooksFurther()
    native = kind in ("mlp-paper", "cnn-paper", "fine-tune")
    assert [adapter.future_steps(backbone, horizon) for horizon in (4, 20)] == ([9, 20] if native else [4, 20])


@pytest.mark.parametrize("kind", ["mlp-paper", "fine-tune"])
def test_native_losses_are_told_the_horizon_and_get_the_labels_they_asked_for(kind: str) -> None:
    seen: list[tuple[int | None, Tensor]] = []

    class Spy(LinearToy):
        def label_start(self, context_length: int) -> int:
            return 3

        def label_horizon(self, horizon: int) -> int:
            return 9

        def loss(self, context: Tensor, labels: Tensor, *, horizon: int | None = None, **kwargs: Any) -> Tensor:
            seen.append((horizon, labels))
            return context[:, :2]

    adapter, steps = make(kind, list(range(CHANNELS)), trained=False), torch.arange(30.0)
    window = steps[None, :, None].expand(1, -1, CHANNELS)
    adapter.objective(Spy(), window, CONTEXT, 6, torch.zeros(1, CHANNELS))
    ((horizon, labels),) = seen
    assert horizon == 6
    torch.testing.assert_close(labels[0], steps[3 : CONTEXT + 9])


@pytest.mark.parametrize("objective", ["paper", "reconstruction"])
def test_the_untouched_error_is_that_of_zero_shot_in_the_measure_of_the_objective(
    objective: str, windows: Tensor
) -> None:
    backbone = NormalisedToy()
    adapter = DualWeaverAdapter(CHANNELS, TARGETS, objective=objective, regularisation=1.0)
    reference = adapter.reference_loss(backbone, windows, CONTEXT, HORIZON)
    forecast = make("zero-shot")(backbone, windows[:, :CONTEXT], HORIZON)
    error = (forecast - windows[:, CONTEXT:, TARGETS]).square().mean(dim=1)
    torch.testing.assert_close(reference, error)


def test_losses_that_sample_compare_surrogates_and_series_under_the_same_draws(windows: Tensor) -> None:
    class Noisy(LinearToy):
        def loss(
            self,
            context: Tensor,
            labels: Tensor,
            *,
            horizon: int | None = None,
            generator: torch.Generator | None = None,
        ) -> Tensor:
            noise = torch.randn(HORIZON if generator else (len(labels), HORIZON), generator=generator)
            return (self(context, horizon) + noise - labels).square()

    adapter = make("mlp-paper", trained=False)  # untrained: the first surrogate is the series itself
    reference = adapter.reference_loss(Noisy(), windows, CONTEXT, HORIZON)
    assert isinstance(adapter, DualWeaverAdapter)
    first, _ = adapter.surrogate_losses(Noisy(), windows, CONTEXT, HORIZON)
    torch.testing.assert_close(first, reference)
    tuned = FineTune(CHANNELS, TARGETS)
    one, other = (tuned.objective(Noisy(), windows, CONTEXT, HORIZON, None) for _ in range(2))
    assert one != other  # fine-tuning sees new noise at every step


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("weights", "tolerance"), [(torch.float64, 1e-6), (torch.bfloat16, 2e-2)])
def test_forecasts_have_the_precision_of_the_data_whatever_that_of_the_backbone(
    kind: str, weights: torch.dtype, tolerance: float, windows: Tensor
) -> None:
    module, adapter = nn.Linear(CONTEXT, HORIZON), make(kind, trained=False)
    nn.init.constant_(module.weight, 0.1)
    nn.init.zeros_(module.bias)
    other = ModuleBackbone(copy.deepcopy(module).to(weights), context_length=CONTEXT)
    with torch.no_grad():
        expected = adapter(ModuleBackbone(module, context_length=CONTEXT), windows[:, :CONTEXT], HORIZON)
        forecast = adapter(other, windows[:, :CONTEXT], HORIZON)
    assert forecast.dtype == torch.float32
    torch.testing.assert_close(forecast, expected, rtol=0, atol=tolerance * float(expected.abs().max()))


def test_the_first_phase_of_adapts_measures_how_rows_are_reproduced(windows: Tensor) -> None:
    adapter = AdaPTS(CHANNELS, TARGETS, latent=CHANNELS)
    nn.init.eye_(adapter.encoder.weight)
    nn.init.zeros_(adapter.encoder.bias)
    adapter.decoder.weight.data = torch.eye(CHANNELS)[TARGETS]
    nn.init.ones_(adapter.decoder.bias)
    torch.testing.assert_close(adapter.reconstruction_loss(windows), torch.tensor(1.0))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: make_adapter("nothing", 2, [0]), "adapter='nothing': expected one of adapts, dualweaver"),
        (lambda: DualWeaverAdapter(2, [0], fusion="rnn"), "fusion='rnn': expected one of cnn, mlp"),
        (lambda: DualWeaverAdapter(2, [0], objective="best"), "objective='best'"),
        (lambda: NormalisedToy(levels=(0.5, 0.9)), "symmetric around 0.5"),
    ],
)
def test_what_cannot_be_built_is_named(build: Callable[[], object], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        build()


@pytest.mark.parametrize("kind", TRAINED)
def test_the_loss_is_the_mean_over_targets_in_which_each_counts_as_weighted(kind: str, windows: Tensor) -> None:
    backbone, adapter = NormalisedToy(CONTEXT, HORIZON).double(), make(kind).double()
    windows = windows.double()
    reference = adapter.reference_loss(backbone, windows, CONTEXT, HORIZON) if adapter.needs_reference else None

    def loss(*weights: float) -> Tensor:
        adapter.weights.copy_(torch.tensor(weights))
        return adapter.objective(backbone, windows, CONTEXT, HORIZON, reference).detach()

    first, second = loss(1, 0), loss(0, 1)
    assert first != second
    torch.testing.assert_close(loss(1, 1), (first + second) / 2, rtol=1e-10, atol=0)
    torch.testing.assert_close(loss(3, 1), (3 * first + second) / 4, rtol=1e-10, atol=0)


@pytest.mark.parametrize("settings", [{}, {"regularisation": 0.5}, {"objective": "paper"}])
def test_the_loss_of_sampled_targets_is_that_of_all_in_the_mean_over_all_samples(
    settings: dict[str, Any], windows: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone, orders = NormalisedToy(CONTEXT, HORIZON).double(), list(itertools.permutations(range(4)))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        full = DualWeaverAdapter(CHANNELS, [6, 0, 3, 2], dropout=0.0, **settings).double()
        for weights in full.parameters():
            nn.init.uniform_(weights, 0.1, 0.6)
    sampled = DualWeaverAdapter(CHANNELS, [6, 0, 3, 2], dropout=0.0, channel_sample=2, **settings).double()
    sampled.load_state_dict(full.state_dict())
    if sampled.weaver.context_filter is not None:
        sampled.weaver.context_filter.strength.fill_(1)  # as in training
    windows = windows.double()
    reference = full.reference_loss(backbone, windows, CONTEXT, HORIZON) if full.needs_reference else None

    def gradient(adapter: DualWeaverAdapter) -> Tensor:
        loss = adapter.objective(backbone, windows, CONTEXT, HORIZON, reference)
        parts = torch.autograd.grad(loss, list(adapter.parameters()))
        return torch.cat([loss.detach().reshape(1), *(part.flatten() for part in parts)])

    expected, found = gradient(full), []
    for order in orders:
        monkeypatch.setattr("dualweaver.adapters.woven.torch.randperm", lambda count, order=order: torch.tensor(order))
        found.append(gradient(sampled))
    torch.testing.assert_close(torch.stack(found).mean(dim=0), expected, rtol=1e-10, atol=1e-12)
    assert len({float(part[0]) for part in found}) == 6  # pairs out of four
    torch.testing.assert_close(gradient(sampled.eval()), expected, rtol=1e-10, atol=1e-12)


def test_a_step_costs_two_series_a_sampled_target_and_depends_on_the_seed_alone(windows: Tensor) -> None:
    asked: list[int] = []

    class Counted(NormalisedToy):
        def native(self, context: Tensor) -> Tensor:
            asked.append(len(context))
            return super().native(context)

    backbone = Counted(CONTEXT, HORIZON)
    adapter = DualWeaverAdapter(CHANNELS, range(CHANNELS), channel_sample=3)
    assert (adapter.series_per_step, adapter.series_per_window) == (6, 2 * CHANNELS)
    losses = []
    with torch.random.fork_rng():
        for seed in (1, 2, 1):
            torch.manual_seed(seed)
            losses.append(adapter.objective(backbone, windows, CONTEXT, HORIZON, None).item())
    assert asked == [6 * len(windows)] * 3
    assert losses[0] == losses[2] != losses[1]
    adapter(backbone, windows[:, :CONTEXT], HORIZON)
    assert asked[3:] == [2 * CHANNELS * len(windows)]
    assert DualWeaverAdapter(CHANNELS, TARGETS, channel_sample=99).series_per_step == 2 * len(TARGETS)
