"""Chronos-Bolt and Chronos-2: tiny random models in their makers' format, against their makers' pipelines."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign import NO_CHRONOS, check_fit, gradient_error, in_units, mixed_scales
from small_backbones import CHRONOS_CONTEXT, TINY_CHRONOS, tiny_2
from torch import Tensor
from toys import waves, weaver
from traps import cheap_refusal, edit

from dualweaver import DualWeaver
from dualweaver.backbones import load_backbone
from dualweaver.errors import CheckpointError, SettingError

chronos = pytest.importorskip("chronos", reason=NO_CHRONOS)

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:We recommend keeping prediction length"),
]


@pytest.fixture(params=TINY_CHRONOS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def checkpoint(name: str, tmp_path: Path) -> Path:
    TINY_CHRONOS[name]().save_pretrained(tmp_path / name)
    return tmp_path / name


def theirs(checkpoint: Path, context: Tensor, horizon: int) -> Tensor:
    """All quantiles of the makers' pipeline, loaded by their loader, `[series, horizon, level]`."""
    pipeline = chronos.BaseChronosPipeline.from_pretrained(checkpoint)
    if isinstance(pipeline, chronos.Chronos2Pipeline):
        found = torch.cat(pipeline.predict(context[:, None], prediction_length=horizon))
    else:
        found = pipeline.predict(context, prediction_length=horizon)
    return found.transpose(1, 2)


@pytest.mark.parametrize("horizon", [5, 16, 40, 70], ids=lambda steps: f"{steps} ahead")
@pytest.mark.parametrize("length", [3, 40, CHRONOS_CONTEXT, CHRONOS_CONTEXT + 21], ids=lambda steps: f"{steps} back")
def test_a_forecast_is_that_of_the_makers_pipeline(name: str, checkpoint: Path, length: int, horizon: int) -> None:
    context = mixed_scales(length)
    forecast = load_backbone(f"{name}:{checkpoint}").forecast(context, horizon)
    quantiles = theirs(checkpoint, context, horizon)
    middle = quantiles.shape[-1] // 2
    assert forecast.quantiles is not None
    assert forecast.levels[middle] == 0.5
    for ours, expected in (
        (forecast.mean, quantiles[..., middle]),
        (forecast.quantiles, quantiles.sort(dim=-1).values),
    ):
        torch.testing.assert_close(in_units(ours, context), in_units(expected, context), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("horizon", [5, 40], ids=["one block", "several blocks"])
def test_gradients_agree_with_finite_differences(name: str, checkpoint: Path, horizon: int) -> None:
    backbone = load_backbone(f"{name}:{checkpoint}", context_length=40)
    assert gradient_error(backbone, mixed_scales(40), horizon) < 2e-2


@pytest.mark.parametrize("horizon", [5, 40], ids=["one block", "several blocks"])
def test_a_constant_series_is_forecast_as_the_constant_without_a_gradient(
    name: str, checkpoint: Path, horizon: int
) -> None:
    backbone = load_backbone(f"{name}:{checkpoint}", context_length=40)
    context = mixed_scales(40)
    context[1] = 0.1
    context.requires_grad_()
    forecast = backbone(context, horizon)
    (forecast / context.detach().std(dim=1, keepdim=True).clamp_min(1)).square().sum().backward()
    assert context.grad is not None
    torch.testing.assert_close(forecast[1], torch.full((horizon,), 0.1))
    assert context.grad.isfinite().all()
    assert not context.grad[1].any()
    assert context.grad[[0, 2, 3]].any(dim=1).all()
    assert backbone.zeroed_gradients == 0


def test_a_large_batch_is_the_small_ones_together(name: str, checkpoint: Path) -> None:
    backbone = load_backbone(f"{name}:{checkpoint}", context_length=40)
    context = torch.randn(150, 40, generator=torch.Generator().manual_seed(0))
    together = backbone.forecast(context, 30).mean
    torch.testing.assert_close(together, backbone.forecast(context, 30, batch_size=7).mean, rtol=1e-4, atol=1e-4)


def test_bfloat16_weights_forecast_close_to_float32(name: str, checkpoint: Path) -> None:
    context = mixed_scales(40)
    full = load_backbone(f"{name}:{checkpoint}", context_length=40)(context)
    half = load_backbone(f"{name}:{checkpoint}", context_length=40, dtype=torch.bfloat16)
    assert next(half.parameters()).dtype == torch.bfloat16
    moving = context.clone().requires_grad_()
    ours = half(moving)
    ours.sum().backward()
    assert ours.dtype == torch.float32
    assert moving.grad is not None
    assert moving.grad.isfinite().all()
    assert (in_units(ours.detach(), context) - in_units(full, context)).abs().mean() < 0.1


def test_limits_come_from_the_configuration(name: str, checkpoint: Path) -> None:
    backbone = load_backbone(f"{name}:{checkpoint}")
    assert backbone.context_length == backbone.max_context == CHRONOS_CONTEXT
    assert backbone.min_context == 1
    assert (backbone.native_horizon, len(backbone.quantile_levels)) == {"chronos-bolt": (16, 9), "chronos-2": (24, 21)}[
        name
    ]
    with pytest.raises(SettingError, match="between 1 and 96"):
        load_backbone(f"{name}:{checkpoint}", context_length=97)


def test_a_fit_lowers_the_error_and_a_saved_one_predicts_the_same(name: str, checkpoint: Path, tmp_path: Path) -> None:
    check_fit(f"{name}:{checkpoint}", 40, tmp_path / "saved")


def test_without_the_package_the_extra_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [module for module in sys.modules if module.split(".")[0] == "chronos"]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SettingError, match=rf"'{name}' needs .* \"dualweaver-forecast\[chronos\]\""):
        load_backbone(name)


def test_the_checkpoint_of_the_other_one_is_refused(name: str, checkpoint: Path) -> None:
    other = next(other for other in TINY_CHRONOS if other != name)
    with pytest.raises(CheckpointError, match=str(checkpoint)):
        load_backbone(f"{other}:{checkpoint}")


@pytest.mark.parametrize("size", [10**9, 10**30, -1, "many", [3]], ids=str)
def test_absurd_sizes_in_the_makers_own_settings_are_refused_before_anything_is_made(
    name: str, checkpoint: Path, size: object
) -> None:
    original = json.loads((checkpoint / "config.json").read_text())["chronos_config"]
    for setting in {"input_patch_size", "prediction_length", "output_patch_size"} & original.keys():
        edit(checkpoint / "config.json", chronos_config=original | {setting: size})
        assert str(checkpoint) in cheap_refusal(load_backbone, f"{name}:{checkpoint}")
    damaged: list[Any] = [{}, None, original | {"quantiles": [0.5]}, original | {"of_tomorrow": 1}]
    for broken in damaged:
        edit(checkpoint / "config.json", chronos_config=broken)
        assert str(checkpoint) in cheap_refusal(load_backbone, f"{name}:{checkpoint}")


@pytest.mark.parametrize("horizon", [5, 24, 50], ids=lambda steps: f"{steps} ahead")
@pytest.mark.parametrize("channels", [1, 3, 70])
def test_a_joint_forecast_is_that_of_the_makers_pipeline_for_all_channels_together(
    tmp_path: Path, channels: int, horizon: int
) -> None:
    tiny_2().save_pretrained(tmp_path)
    backbone = load_backbone(f"chronos-2:{tmp_path}")
    windows = torch.randn(3, 40, channels, generator=torch.Generator().manual_seed(0)).cumsum(dim=1)
    forecast = backbone.joint(windows, horizon)
    pipeline = chronos.BaseChronosPipeline.from_pretrained(tmp_path)
    found = torch.cat(pipeline.predict(windows.transpose(1, 2), prediction_length=horizon)).transpose(1, 2)
    context = windows.transpose(1, 2).flatten(0, 1)
    assert forecast.quantiles is not None
    for ours, expected in ((forecast.mean, found[..., 10]), (forecast.quantiles, found.sort(dim=-1).values)):
        torch.testing.assert_close(in_units(ours, context), in_units(expected, context), rtol=1e-5, atol=1e-5)
    if channels == 1:
        torch.testing.assert_close(forecast.mean, backbone(context, horizon), rtol=1e-4, atol=1e-4)


def test_the_joint_adapter_is_fitted_compared_saved_and_chosen_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_2().save_pretrained(tmp_path / "model")
    name, frame = f"chronos-2:{tmp_path / 'model'}", waves(260)
    settings: dict[str, Any] = {"horizon": 8, "context_length": 40, "max_epochs": 1, "verbose": False}
    model = DualWeaver(name, adapter="joint", targets=["a", "c"], **settings).fit(frame)
    assert model.scores_ is not None
    assert (model.scores_["mse"] <= model.scores_["zero_shot_mse"]).all()
    assert set(model.scores_["forecaster"]) <= {"joint", "zero-shot"}
    model.save(tmp_path / "saved")
    forecast = model.predict(frame, level=[80])
    assert DualWeaver.load(tmp_path / "saved").predict(frame, level=[80]).equals(forecast)
    plain = DualWeaver(name, adapter="zero-shot", targets=["a", "c"], **settings).fit(frame).predict(frame)
    on_its_own = model.scores_["forecaster"] == "zero-shot"
    for column in ("a", "c"):
        assert forecast[column].equals(plain[column]) == on_its_own[column]
    monkeypatch.setattr("dualweaver.fit.fitting.lowest", lambda errors: 0)
    auto = DualWeaver(name, adapter="auto", **settings).fit(frame)
    assert auto.adapter_ == "joint"
    auto.save(tmp_path / "auto")
    assert DualWeaver.load(tmp_path / "auto").predict(frame).equals(auto.predict(frame))


def test_joint_forecasts_are_refused_where_the_backbone_takes_one_series_at_a_time() -> None:
    with pytest.raises(SettingError, match="adapter='joint': the backbone 'module' takes one series at a time"):
        weaver(adapter="joint").fit(waves(260))
