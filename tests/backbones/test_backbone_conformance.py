"""What every backbone must do, whatever the model: one suite over all of them."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from small_backbones import FACTORIES, series
from torch import nn

from dualweaver.backbones import Backbone, available_backbones, load_backbone


@pytest.fixture(params=FACTORIES)
def backbone(request: pytest.FixtureRequest) -> Backbone:
    """A small frozen backbone with fixed weights; random ones, where the real ones are large."""
    torch.manual_seed(0)
    return FACTORIES[request.param]().freeze()


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def test_every_registered_backbone_is_in_the_suite() -> None:
    assert set(available_backbones()) <= set(FACTORIES)


def test_a_context_becomes_a_forecast_of_the_native_or_the_given_horizon(backbone: Backbone) -> None:
    context, native = series(backbone), backbone.native_horizon
    assert backbone(context).shape == (4, native)
    assert backbone(context, 3).shape == (4, 3)
    assert backbone(context, 2 * native + 1).shape == (4, 2 * native + 1)


def test_what_native_returns_is_what_the_attributes_say(backbone: Backbone) -> None:
    levels = len(backbone.quantile_levels)
    expected = (4, backbone.native_horizon) + ((levels,) if levels else ())
    assert backbone.native(series(backbone)).shape == expected
    assert backbone.min_context <= backbone.context_length
    assert backbone.max_context is None or backbone.context_length <= backbone.max_context


def test_a_rolled_forecast_begins_with_the_native_one(backbone: Backbone) -> None:
    context, native = series(backbone), backbone.native_horizon
    torch.testing.assert_close(backbone(context, native + 3)[:, :native], backbone(context), rtol=1e-5, atol=1e-5)


def test_a_series_is_forecast_as_it_is_alone(backbone: Backbone) -> None:
    context = series(backbone)
    together = backbone.forecast(context, backbone.native_horizon + 3)
    alone = backbone.forecast(context[2:3], backbone.native_horizon + 3)
    torch.testing.assert_close(together.mean[2:3], alone.mean, rtol=1e-4, atol=1e-4)
    in_pairs = backbone.forecast(context, backbone.native_horizon + 3, batch_size=2)
    torch.testing.assert_close(together.mean, in_pairs.mean, rtol=1e-4, atol=1e-4)


def test_gradients_reach_the_context_of_their_own_series_and_no_weight(backbone: Backbone) -> None:
    before = backbone.fingerprint()
    context = series(backbone).requires_grad_()
    backbone(context)[1].sum().backward()
    assert context.grad is not None
    assert torch.isfinite(context.grad).all()
    assert context.grad[1].abs().sum() > 0
    assert not context.grad[[0, 2, 3]].any()
    assert all(weights.grad is None for weights in backbone.parameters())
    assert backbone.fingerprint() == before


def test_gradients_pass_through_a_rolled_forecast(backbone: Backbone) -> None:
    context = series(backbone).requires_grad_()
    backbone(context, backbone.native_horizon + 2)[:, -1].sum().backward()
    assert context.grad is not None
    assert torch.isfinite(context.grad).all()
    assert context.grad.abs().sum() > 0


def test_a_frozen_backbone_stays_in_evaluation_mode_inside_a_training_module(backbone: Backbone) -> None:
    parent = nn.ModuleList([backbone, nn.Dropout()]).train()
    assert parent[1].training
    assert not any(module.training for module in backbone.modules())
    with backbone.unfrozen():
        parent.train()
        assert all(module.training for module in backbone.modules())
        assert all(weights.requires_grad for weights in backbone.parameters())
    assert not any(module.training for module in backbone.modules())
    assert not any(weights.requires_grad for weights in backbone.parameters())


def test_fine_tuning_gives_gradients_to_weights(backbone: Backbone) -> None:
    start, context = backbone.label_start(backbone.context_length), series(backbone)
    labels = series(backbone, extra=backbone.label_horizon(backbone.native_horizon))[:, start:]
    with backbone.unfrozen():
        backbone.loss(context, labels, horizon=backbone.native_horizon, generator=seeded()).mean().backward()
        assert any(weights.grad is not None and weights.grad.any() for weights in backbone.parameters())


def test_two_calls_give_the_same_bits(backbone: Backbone) -> None:
    context = series(backbone)
    assert torch.equal(backbone(context), backbone(context))
    first, second = (backbone.forecast(context, seed=5) for _ in range(2))
    assert torch.equal(first.mean, second.mean)
    if first.quantiles is not None and second.quantiles is not None:
        assert torch.equal(first.quantiles, second.quantiles)


def test_a_forecast_under_inference_leaves_later_training_alone(backbone: Backbone) -> None:
    backbone.forecast(series(backbone))
    context = series(backbone).requires_grad_()
    backbone(context).sum().backward()
    assert context.grad is not None


def test_double_precision_works_and_agrees_with_single(backbone: Backbone) -> None:
    single = backbone(series(backbone))
    exact = copy.deepcopy(backbone).double()(series(backbone, dtype=torch.float64))
    assert exact.dtype == torch.float64
    torch.testing.assert_close(exact.float(), single, rtol=1e-3, atol=1e-3)


def test_a_forecast_comes_in_the_dtype_of_its_context(backbone: Backbone) -> None:
    assert backbone(series(backbone, dtype=torch.float64)).dtype == torch.float64


def test_quantiles_ascend_with_their_levels(backbone: Backbone) -> None:
    horizon = backbone.native_horizon + 3
    forecast = backbone.forecast(series(backbone), horizon)
    assert forecast.mean.shape == (4, horizon)
    assert forecast.levels == backbone.quantile_levels
    if not backbone.quantile_levels:
        assert forecast.quantiles is None
        return
    assert forecast.quantiles is not None
    assert list(forecast.levels) == sorted(forecast.levels)
    assert forecast.quantiles.shape == (4, horizon, len(forecast.levels))
    assert (forecast.quantiles.diff(dim=-1) >= 0).all()
    inside = (forecast.mean >= forecast.quantiles[..., 0]) & (forecast.mean <= forecast.quantiles[..., -1])
    assert inside.float().mean() > 0.95  # a mean of skewed samples may lie outside now and then


def test_a_context_that_is_too_short_is_refused_with_the_minimum(backbone: Backbone) -> None:
    short = series(backbone)[:, : backbone.min_context - 1]
    with pytest.raises(ValueError, match=f"needs at least {backbone.min_context}"):
        backbone(short)
    with pytest.raises(ValueError, match=f"needs at least {backbone.min_context}"):
        backbone.forecast(short)


def test_the_shortest_context_works(backbone: Backbone) -> None:
    shortest = series(backbone)[:, -backbone.min_context :]
    assert torch.isfinite(backbone.forecast(shortest, backbone.native_horizon + 1).mean).all()


def test_values_that_are_not_finite_are_refused_with_their_series(backbone: Backbone) -> None:
    for value in (float("nan"), float("inf")):
        context = series(backbone)
        context[2, 5] = value
        with pytest.raises(ValueError, match="not finite, first in series 2"):
            backbone.forecast(context)


def test_a_constant_series_has_a_finite_forecast_and_gradient(backbone: Backbone) -> None:
    context = torch.full((2, backbone.context_length), 3.0, requires_grad=True)
    forecast = backbone(context)
    forecast.sum().backward()
    assert context.grad is not None
    assert torch.isfinite(forecast).all()
    assert torch.isfinite(context.grad).all()


def test_the_loss_is_finite_per_series_and_differentiable(backbone: Backbone) -> None:
    assert backbone.loss_kind in ("squared", "absolute")
    window = series(backbone, extra=backbone.label_horizon(backbone.native_horizon)).requires_grad_()
    context, labels = window[:, : backbone.context_length], window[:, backbone.label_start(backbone.context_length) :]
    loss = backbone.loss(context, labels, horizon=backbone.native_horizon, generator=seeded())
    assert loss.ndim == 2
    assert len(loss) == 4
    assert torch.isfinite(loss).all()
    assert (loss >= 0).all()
    loss[1].sum().backward()
    assert window.grad is not None
    assert window.grad[1].any()
    assert not window.grad[[0, 2, 3]].any()


def test_copies_and_state_dicts_forecast_the_same(backbone: Backbone, request: pytest.FixtureRequest) -> None:
    context, expected = series(backbone), backbone(series(backbone))
    twin = copy.deepcopy(backbone)
    assert twin.fingerprint() == backbone.fingerprint()
    assert torch.equal(twin(context), expected)
    other = FACTORIES[request.node.callspec.params["backbone"]]().freeze()
    other.load_state_dict(backbone.state_dict())
    assert torch.equal(other(context), expected)


def test_a_saved_backbone_loads_again_by_name_and_from_its_spec(backbone: Backbone, tmp_path: Path) -> None:
    if backbone.name == "module":
        pytest.skip("a module of one's own has no name to be loaded by")
    if backbone.name not in ("fracast", "loom"):  # whose weights come with their packages
        backbone.model.save_pretrained(tmp_path)  # type: ignore[operator, union-attr]
        backbone.checkpoint = str(tmp_path)
    again = load_backbone(backbone.spec, context_length=backbone.context_length)
    assert again.spec == backbone.spec
    assert again.fingerprint() == backbone.fingerprint()
    assert torch.equal(again(series(backbone)), backbone(series(backbone)))
