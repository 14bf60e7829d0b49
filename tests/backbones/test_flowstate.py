"""FlowState against the recorded forecasts of its makers' package on small random models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from foreign import check_fit, gradient_error, in_units, mixed_scales
from golden import load, model_directory
from small_backbones import tiny_flowstate

from dualweaver.backbones import load_backbone
from dualweaver.backbones.flowstate import FlowStateBackbone, FlowStateConfig, FlowStateForPrediction
from dualweaver.errors import CheckpointError, SettingError

pytestmark = pytest.mark.usefixtures("one_thread")

RECORDED = ["flowstate_a", "flowstate_b"]  # the gated and the transformer-like feed-forward, either kind of polynomials
CASES = [(5, 4, 1.0), (40, 12, 1.0), (40, 30, 1.0), (120, 24, 1.0), (120, 40, 1.0), (40, 40, 0.5), (96, 20, 2.0)]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tiny_flowstate().save_pretrained(tmp_path / "flowstate")
    return tmp_path / "flowstate"


@pytest.mark.parametrize("case", CASES, ids=lambda case: "{} back, {} ahead, scale {}".format(*case))
@pytest.mark.parametrize("name", RECORDED)
def test_forecasts_equal_the_recorded_ones(name: str, case: tuple[int, int, float]) -> None:
    length, horizon, scale = case
    recorded = load(name, "golden.safetensors")
    backbone = FlowStateBackbone.from_checkpoint(model_directory(name), scale_factor=scale)
    context = recorded["context"][:, -length:]
    forecast = backbone.forecast(context, horizon)
    assert forecast.quantiles is not None
    for ours, kind in ((forecast.mean, "point"), (forecast.quantiles, "quantiles")):
        expected = recorded[f"{kind}_{length}_{horizon}_{scale}"]
        torch.testing.assert_close(in_units(ours, context), in_units(expected, context), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("horizon", [7, 12, 13, 23, 24, 25, 40])
def test_every_step_is_read_off_the_last_position_that_knows_it(checkpoint: Path, horizon: int) -> None:
    backbone = load_backbone(f"flowstate:{checkpoint}")
    forecast = backbone(mixed_scales(40), horizon)
    longest = backbone(mixed_scales(40), 48)
    assert forecast.shape == (4, horizon)
    whole = horizon // 12 * 12 or horizon  # the steps after them come from one more position
    torch.testing.assert_close(forecast[:, :whole], longest[:, :whole], rtol=1e-4, atol=1e-4)


def test_a_horizon_beyond_half_of_what_the_model_takes_is_rolled_forward(checkpoint: Path) -> None:
    backbone, context = load_backbone(f"flowstate:{checkpoint}"), mixed_scales(90)
    first = backbone(context, 60)  # a patch and half of 96 steps
    second = backbone(torch.cat([context, first], dim=1), 10)
    torch.testing.assert_close(backbone(context, 70), torch.cat([first, second], dim=1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("horizon", [12, 30, 70], ids=lambda steps: f"{steps} ahead")
@pytest.mark.parametrize("name", RECORDED)
def test_gradients_agree_with_finite_differences(name: str, horizon: int) -> None:
    backbone = load_backbone(f"flowstate:{model_directory(name)}")
    assert gradient_error(backbone, mixed_scales(40), horizon, step=1e-5) < 1e-5


def test_a_constant_series_is_forecast_about_its_constant_with_a_finite_gradient(checkpoint: Path) -> None:
    backbone = load_backbone(f"flowstate:{checkpoint}")
    context = mixed_scales(40)
    context[1] = 7.0
    context[2, :25] = 0.05
    context.requires_grad_()
    forecast = backbone(context, 30)
    forecast.sum().backward()
    assert context.grad is not None
    assert context.grad.isfinite().all()
    assert (forecast[1] - 7).abs().max() < 0.1
    assert backbone.zeroed_gradients == 0


def test_forecasts_are_affine_equivariant(checkpoint: Path) -> None:
    backbone = load_backbone(f"flowstate:{checkpoint}").double()
    context = mixed_scales(40)[:1].double()
    torch.testing.assert_close(backbone(5 * context + 2, 30), 5 * backbone(context, 30) + 2, rtol=1e-2, atol=1e-2)


def test_bfloat16_weights_forecast_close_to_float32(checkpoint: Path) -> None:
    context = mixed_scales(40)
    full = load_backbone(f"flowstate:{checkpoint}")(context, 30)
    half = load_backbone(f"flowstate:{checkpoint}", dtype=torch.bfloat16)
    ours = half(context, 30)
    assert half.model.dtype == torch.bfloat16
    assert ours.dtype == torch.float32
    assert (in_units(ours, context) - in_units(full, context)).abs().mean() < 0.05


def test_the_scale_decides_how_far_back_and_ahead_the_model_sees(checkpoint: Path) -> None:
    slow = FlowStateBackbone.from_checkpoint(str(checkpoint), scale_factor=0.5)
    assert (slow.max_context, slow.native_horizon) == (192, 24)
    fast = FlowStateBackbone.from_checkpoint(str(checkpoint), scale_factor=2)
    assert (fast.max_context, fast.native_horizon) == (48, 6)
    with pytest.raises(SettingError, match="scale_factor=0"):
        FlowStateBackbone.from_checkpoint(str(checkpoint), scale_factor=0)


def test_configurations_that_cannot_be_computed_are_refused() -> None:
    for setting in ({"decoder_type": "four"}, {"with_missing": False}, {"mlp_type": "other"}):
        with pytest.raises(CheckpointError, match=next(iter(setting))):
            tiny_flowstate(**setting)


def test_the_default_configuration_has_about_the_published_size() -> None:
    with torch.device("meta"):
        model = FlowStateForPrediction(FlowStateConfig())
    assert 8e6 < sum(weights.numel() for weights in model.parameters()) < 12e6


def test_a_fit_lowers_the_error_and_a_saved_one_predicts_the_same(checkpoint: Path, tmp_path: Path) -> None:
    check_fit(f"flowstate:{checkpoint}", 40, tmp_path / "saved")
