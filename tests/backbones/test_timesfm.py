"""TimesFM 2.5: tiny random models in the library's own format, against the library's own forward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from foreign import check_fit, gradient_error, mixed_scales
from small_backbones import tiny_timesfm
from torch import Tensor
from transformers import TimesFm2_5Config, TimesFm2_5ModelForPrediction

from dualweaver.backbones import load_backbone
from dualweaver.backbones.timesfm import TimesFMBackbone
from dualweaver.errors import SettingError

pytestmark = pytest.mark.usefixtures("one_thread")

PATCH, HORIZON = 8, 16


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tiny_timesfm().save_pretrained(tmp_path / "timesfm")
    return tmp_path / "timesfm"


def theirs(checkpoint: Path, context: Tensor) -> tuple[Tensor, Tensor]:
    """Median and quantiles of a model that the library loaded by itself."""
    model = TimesFm2_5ModelForPrediction.from_pretrained(checkpoint)
    with torch.no_grad():
        output = model(
            past_values=list(context),
            forecast_context_len=context.shape[1],
            truncate_negative=False,
            force_flip_invariance=False,
        )
    return output.mean_predictions, output.full_predictions[..., 1:]


@pytest.mark.parametrize("length", [PATCH, 40, 96])
def test_a_forecast_is_the_librarys_own(checkpoint: Path, length: int) -> None:
    backbone, context = load_backbone(f"timesfm:{checkpoint}", context_length=length), mixed_scales(length)
    forecast = backbone.forecast(context)
    median, quantiles = theirs(checkpoint, context)
    scale = context.std(dim=1, keepdim=True)
    torch.testing.assert_close(forecast.mean / scale, median / scale, rtol=1e-5, atol=1e-5)
    assert forecast.quantiles is not None
    sorted_ = quantiles.sort(dim=-1).values
    torch.testing.assert_close(forecast.quantiles / scale[..., None], sorted_ / scale[..., None], rtol=1e-5, atol=1e-5)


def test_the_second_block_continues_from_the_median_of_the_first(checkpoint: Path) -> None:
    backbone, context = load_backbone(f"timesfm:{checkpoint}", context_length=40), mixed_scales(40)
    first, _ = theirs(checkpoint, context)
    second, _ = theirs(checkpoint, torch.cat([context, first], dim=1)[:, -40:])
    scale = context.std(dim=1, keepdim=True)
    rolled = backbone.forecast(context, 2 * HORIZON).mean
    torch.testing.assert_close(rolled / scale, torch.cat([first, second], dim=1) / scale, rtol=1e-5, atol=1e-5)


def test_an_incomplete_patch_is_cut_from_the_left_and_a_long_context_to_what_the_model_takes(checkpoint: Path) -> None:
    backbone, context = load_backbone(f"timesfm:{checkpoint}"), mixed_scales(101)
    assert backbone.context_length == 96
    torch.testing.assert_close(backbone(context), backbone(context[:, 5:]))
    torch.testing.assert_close(backbone(context[:, :43]), backbone(context[:, 3:43]))


def test_gradients_agree_with_finite_differences(checkpoint: Path) -> None:
    backbone = load_backbone(f"timesfm:{checkpoint}", context_length=40)
    assert gradient_error(backbone, mixed_scales(40), 2 * HORIZON) < 1e-2


@pytest.mark.parametrize("still", [PATCH, 20, 39], ids=lambda steps: f"{steps} steps")
def test_a_series_that_begins_with_a_constant_stretch_is_trained_through(checkpoint: Path, still: int) -> None:
    backbone = load_backbone(f"timesfm:{checkpoint}", context_length=40)
    context = mixed_scales(40)
    context[1, :still] = 3.0
    context.requires_grad_()
    backbone(context, HORIZON + 1).square().sum().backward()
    assert context.grad is not None
    assert context.grad.isfinite().all()
    assert context.grad[1].any()
    assert backbone.zeroed_gradients == 0
    kept = torch.zeros(context.shape, dtype=torch.bool)
    kept[1, :still] = True
    assert gradient_error(backbone, context.detach(), HORIZON, still=kept) < 1e-2


def test_a_constant_series_is_forecast_as_the_constant_without_a_gradient(checkpoint: Path) -> None:
    backbone = load_backbone(f"timesfm:{checkpoint}", context_length=40)
    context = mixed_scales(40)
    context[1] = -7.5
    context.requires_grad_()
    forecast = backbone(context, 2 * HORIZON)
    forecast.square().sum().backward()
    assert context.grad is not None
    assert (forecast[1] == -7.5).all()
    assert context.grad.isfinite().all()
    assert not context.grad[1].any()
    assert backbone.zeroed_gradients == 0


def test_forecasts_are_affine_equivariant(checkpoint: Path) -> None:
    backbone, context = load_backbone(f"timesfm:{checkpoint}", context_length=40), mixed_scales(40)[:1]
    torch.testing.assert_close(backbone(5 * context + 2), 5 * backbone(context) + 2, rtol=1e-4, atol=1e-4)


def test_bfloat16_weights_forecast_close_to_float32(checkpoint: Path) -> None:
    context = mixed_scales(40)
    full = load_backbone(f"timesfm:{checkpoint}", context_length=40)(context)
    half = load_backbone(f"timesfm:{checkpoint}", context_length=40, dtype=torch.bfloat16)
    assert next(half.parameters()).dtype == torch.bfloat16
    ours = half(context)
    assert ours.dtype == torch.float32
    assert ((ours - full).abs().amax(dim=1) < 0.2 * context.std(dim=1)).all()
    moving = context.clone().requires_grad_()
    half(moving).sum().backward()
    assert moving.grad is not None
    assert moving.grad.isfinite().all()


def test_limits_come_from_the_configuration(checkpoint: Path) -> None:
    backbone = TimesFMBackbone(tiny_timesfm(context_length=4096, horizon_length=128))
    assert (backbone.context_length, backbone.max_context, backbone.min_context) == (2048, 4096, PATCH)
    assert backbone.native_horizon == 128
    with pytest.raises(SettingError, match="between 8 and 96"):
        load_backbone(f"timesfm:{checkpoint}", context_length=97)


def test_the_published_configuration_has_the_published_size() -> None:
    with torch.device("meta"):
        model = TimesFm2_5ModelForPrediction(TimesFm2_5Config())
    assert 200e6 < sum(weights.numel() for weights in model.parameters()) < 240e6


def test_a_fit_lowers_the_error_and_a_saved_one_predicts_the_same(checkpoint: Path, tmp_path: Path) -> None:
    check_fit(f"timesfm:{checkpoint}", 40, tmp_path / "saved")
