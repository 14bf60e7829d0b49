"""Loom: short, constant and extreme contexts, its levels, its weights."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from places import EXPERIMENTS
from safetensors.torch import load_file, save_file
from torch import Tensor

from dualweaver.backbones import load_backbone
from dualweaver.backbones import loom as package
from dualweaver.backbones.base import Backbone
from dualweaver.backbones.loom import LoomBackbone
from dualweaver.errors import CheckpointError, SettingError

HERE = Path(package.__file__).parent
PRETRAIN = EXPERIMENTS / "pretrain"


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return load_backbone("loom")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    for name in ("loom.json", "loom.safetensors"):
        shutil.copy(HERE / name, tmp_path / name)
    return tmp_path


def days(count: int = 3, length: int = 512, period: int = 24) -> Tensor:
    """Days of one wave and a little noise, `[count, length]`."""
    time = torch.arange(length) + torch.arange(count)[:, None] * 5
    noise = torch.randn(count, length, generator=torch.Generator().manual_seed(0))
    return torch.sin(2 * torch.pi * time / period) + 0.1 * noise


def gradient(backbone: Backbone, context: Tensor) -> tuple[Tensor, Tensor]:
    asked = context.clone().requires_grad_()
    forecast = backbone(asked)
    forecast.sum().backward()
    assert asked.grad is not None
    return forecast.detach(), asked.grad


def test_it_is_small_and_its_weights_come_with_the_package(backbone: Backbone) -> None:
    assert 2e5 <= sum(weights.numel() for weights in backbone.parameters()) <= 1e6
    assert (HERE / "loom.safetensors").stat().st_size <= 4 * 2**20


@pytest.mark.parametrize("length", [32, 33, 100, 511, 512, 700])
def test_every_length_from_32_steps_has_a_finite_forecast_and_gradient(backbone: Backbone, length: int) -> None:
    forecast, grad = gradient(backbone, days(length=length))
    assert forecast.shape == (3, 96)
    assert torch.isfinite(forecast).all()
    assert torch.isfinite(grad).all()
    assert grad[:, -32:].any()


def test_of_a_long_context_the_last_512_steps_count(backbone: Backbone) -> None:
    long = days(length=700)
    torch.testing.assert_close(backbone(long), backbone(long[:, -512:]))


@pytest.mark.parametrize("size", [1e-8, 1e-4, 1.0, 1e8])
@pytest.mark.parametrize("length", [32, 512])
def test_forecasts_and_gradients_are_finite_at_every_size(backbone: Backbone, size: float, length: int) -> None:
    for shape in (days(length=length), torch.ones(2, length), torch.zeros(2, length)):
        forecast, grad = gradient(backbone, shape * size)
        assert torch.isfinite(forecast).all()
        assert torch.isfinite(grad).all()
        quantiles = backbone.distribution(shape * size).quantiles
        assert quantiles is not None
        assert torch.isfinite(quantiles).all()


@pytest.mark.parametrize("value", [0.0, 3.0, -1e8, 1e-8])
def test_a_constant_context_is_forecast_to_stay(backbone: Backbone, value: float) -> None:
    forecast = backbone(torch.full((1, 512), value))
    assert (forecast - value).abs().max() <= 1e-5 * abs(value) + 1e-10


@pytest.mark.parametrize(("scale", "shift"), [(2.0, 5.0), (1e-8, 0.0), (1e8, -3e8)])
def test_another_unit_gives_the_same_forecast_in_that_unit(backbone: Backbone, scale: float, shift: float) -> None:
    exact = load_backbone("loom", dtype=torch.float64)
    context = days().double()
    moved = exact(context * scale + shift)
    torch.testing.assert_close(moved, exact(context) * scale + shift, rtol=1e-4, atol=1e-4 * scale)


def test_levels_never_cross_even_far_from_what_was_trained(backbone: Backbone) -> None:
    wild = torch.randn(64, 512, generator=torch.Generator().manual_seed(1)).cumsum(dim=1).exp().clamp(max=1e6)
    assert isinstance(backbone, LoomBackbone)
    assert (backbone.native(wild).diff(dim=-1) >= 0).all()


def test_the_point_forecast_is_the_middle_level(backbone: Backbone) -> None:
    forecast = backbone.distribution(days(), 150)
    assert forecast.quantiles is not None
    torch.testing.assert_close(forecast.mean, forecast.quantiles[..., 4])


@pytest.mark.parametrize("period", [24, 48, 96])
def test_a_day_is_recognised_at_usual_sampling_rates(backbone: Backbone, period: int) -> None:
    series = days(4, 608, period)
    error = (backbone(series[:, :512]) - series[:, 512:]).square().mean()
    assert error < 0.15  # the wave itself has 0.5, a lasting level more


def test_series_of_a_large_batch_are_forecast_as_in_a_small_one(backbone: Backbone) -> None:
    many = days(300)
    torch.testing.assert_close(backbone(many)[250:], backbone(many[250:]), rtol=1e-4, atol=1e-4)


def test_a_context_beyond_512_steps_cannot_be_asked_for() -> None:
    with pytest.raises(SettingError, match="between 32 and 512"):
        load_backbone("loom", context_length=1024)


def test_weights_of_a_directory_load_by_its_name(checkpoint: Path, backbone: Backbone) -> None:
    again = load_backbone(f"loom:{checkpoint}")
    assert again.fingerprint() == backbone.fingerprint()
    assert again.spec == f"loom:{checkpoint}"


def test_a_missing_file_is_named(checkpoint: Path) -> None:
    (checkpoint / "loom.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"loom\.safetensors is missing"):
        load_backbone(f"loom:{checkpoint}")


def test_a_missing_misshapen_or_foreign_tensor_is_named(checkpoint: Path) -> None:
    file = checkpoint / "loom.safetensors"
    whole = load_file(file)
    rest = {name: value for name, value in whole.items() if name != "centre.bias"}
    for changed in (rest, whole | {"centre.bias": torch.zeros(2)}):
        save_file(changed, file)
        with pytest.raises(CheckpointError, match=r"centre\.bias"):
            load_backbone(f"loom:{checkpoint}")
    save_file(whole | {"stranger": torch.zeros(2)}, file)
    with pytest.raises(CheckpointError, match="stranger"):
        load_backbone(f"loom:{checkpoint}")


def test_a_damaged_configuration_is_refused(checkpoint: Path) -> None:
    for text in ("{", "[]", json.dumps({"layers": 2, "colour": 1, "quantiles": [0.5]})):
        (checkpoint / "loom.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"loom\.json"):
            load_backbone(f"loom:{checkpoint}")


def test_series_to_pretrain_on_are_finite_and_follow_from_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PRETRAIN)
    draw = importlib.import_module("synthetic").draw_series
    first, second, other = (draw(256, 608, np.random.default_rng(seed)) for seed in (0, 0, 1))
    assert np.isfinite(first).all()
    assert np.array_equal(first, second)
    assert not np.array_equal(first, other)
    assert (first.std(axis=1) < 1.01).all()


def test_a_pretraining_that_stopped_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, one_thread: None) -> None:
    monkeypatch.syspath_prepend(PRETRAIN)
    train = importlib.import_module("pretrain").main
    told = ["--teacher", "loom", "--out", str(tmp_path), "--batch", "16", "--pool", "1024"]
    train([*told, "--steps", "120"])
    before = load_backbone(f"loom:{tmp_path / 'loom'}")
    train([*told, "--steps", "240"])
    assert load_backbone(f"loom:{tmp_path / 'loom'}").fingerprint() != before.fingerprint()
    assert pd.read_csv(tmp_path / "log.csv")["step"].tolist() == [100, 200]
    assert (tmp_path / "loss.png").is_file()
