"""Fracast against the package it comes from: forecasts, rolled forecasts, gradients; and what the package cannot do."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import fracast
import numpy as np
import pytest
import torch
from fracast import FracastModel as Reference
from fracast._core.model import build_from_cfg
from safetensors.torch import load_file, save_file
from torch import Tensor

from dualweaver.backbones import load_backbone
from dualweaver.backbones.fracast.core import FracastConfig, FracastModel, significant_periods
from dualweaver.errors import CheckpointError, SettingError

WEIGHTS = Path(fracast.__file__).parent / "weights"


def series(length: int) -> np.ndarray:
    """Seasonal series on different levels, a random walk, and a cycle without noise: `[5, length]`, float32."""
    rng, time = np.random.default_rng(0), np.arange(length)
    rows = [(24, 1.0, 0.05, 0.0), (7, 3.0, 0.1, 20.0), (168, 2.0, 0.02, -5.0), (1, 0.0, 1.0, 0.0), (12, 1.0, 0.0, 0.0)]
    return np.stack(
        [np.sin(2 * np.pi * time / p) * a + rng.normal(size=length).cumsum() * s + level for p, a, s, level in rows]
    ).astype(np.float32)


@cache
def reference(window: int) -> Reference:
    """The package's model with float32 weights, configured for another window."""
    config = json.loads((WEIGHTS / "config.json").read_text())
    config["model"] |= {"W": window, "level_widths": [window]}
    core, head = build_from_cfg(config)
    state = load_file(WEIGHTS / "model.safetensors")
    for module, prefix in ((core, "core."), (head, "head.")):
        module.load_state_dict({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})
    return Reference(core.requires_grad_(False), head.requires_grad_(False), config)


def reference_native(context: Tensor) -> Tensor:
    """The package's modules, called with gradients: `[series, window]` to `[series, 48, 9]`."""
    model: Any = reference(context.shape[1])
    low = context.amin(dim=1, keepdim=True)
    span = (context.amax(dim=1, keepdim=True) - low).clamp_min(1e-5)
    values = (context - low) / span
    mask = torch.ones_like(values, dtype=torch.bool)
    hidden = model.core(values[:, None], mask[:, None], mask[:, None])
    quantiles = model.head.forward_horizon(hidden, last_obs=values[:, -1:], ctx=values, ctx_mask=mask)
    return quantiles * span[..., None] + low[..., None]


def relative_error(ours: Tensor | None, theirs: np.ndarray, context: np.ndarray) -> float:
    assert ours is not None
    scale = np.ptp(context, axis=1)[:, None, None]
    return float((np.abs(np.asarray(ours) - theirs) / scale).max())


def test_forecasts_equal_the_released_models_at_its_full_context() -> None:
    context = series(2048)
    released = Reference.from_pretrained(weights="fp32")
    ours = load_backbone("fracast", context_length=2048).forecast(context, 96)
    theirs = released.forecast(context, horizon=96)
    assert relative_error(ours.quantiles, np.sort(theirs, axis=-1), context) < 1e-5
    assert relative_error(ours.mean[..., None], theirs[..., 4:5], context) < 1e-5
    native = load_backbone("fracast", context_length=2048).forecast(context).quantiles
    assert relative_error(native, np.sort(released.forecast(context), axis=-1), context) < 1e-5


@pytest.mark.parametrize("length", [700, 512, 300, 64, 8], ids="{} steps".format)
@pytest.mark.parametrize("horizon", [48, 96])
def test_forecasts_equal_the_packages_for_every_length_of_the_context(length: int, horizon: int) -> None:
    context = series(length)
    ours = load_backbone("fracast").forecast(context, horizon).quantiles
    theirs = np.sort(reference(512).forecast(context, horizon=horizon), axis=-1)
    assert relative_error(ours, theirs, context) < 1e-5


def test_a_window_that_is_no_power_of_two_is_fine() -> None:
    context = series(350)
    ours = load_backbone("fracast", context_length=350).forecast(context).quantiles
    assert relative_error(ours, np.sort(reference(350).forecast(context), axis=-1), context) < 1e-5


@pytest.mark.parametrize("length", [512, 96])
def test_gradients_equal_those_through_the_packages_modules(length: int) -> None:
    ours = torch.tensor(series(length), requires_grad=True)
    theirs = torch.tensor(series(length), requires_grad=True)
    weights = torch.randn(5, 48, 9, generator=torch.Generator().manual_seed(1))
    (load_backbone("fracast", context_length=length).native(ours) * weights).sum().backward()
    (reference_native(theirs) * weights).sum().backward()
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=2e-5 * float(ours.grad.abs().max()))


@pytest.mark.parametrize("length", [40, 64], ids=["padded", "full"])
def test_gradients_equal_finite_differences_in_double_precision(length: int) -> None:
    backbone = load_backbone("fracast", context_length=64, dtype=torch.float64)
    context = torch.tensor(series(length)[:2], dtype=torch.float64, requires_grad=True)
    step = torch.randn(context.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 1e-6
    step[context == context.amin(1, keepdim=True)] = 0  # a corner where two steps share the extreme
    weights = torch.linspace(-1, 1, 48 * 9, dtype=torch.float64).view(48, 9)
    (gradient,) = torch.autograd.grad((backbone.native(context) * weights).sum(), context)
    with torch.no_grad():
        up, down = ((backbone.native(context + sign * step) * weights).sum() for sign in (1, -1))
    assert float(up - down) / 2 == pytest.approx(float((gradient * step).sum()), rel=1e-6)


def test_frozen_and_trainable_weights_compute_the_same_function() -> None:
    backbone = load_backbone("fracast", context_length=128, dtype=torch.float64)
    context = torch.tensor(series(128), dtype=torch.float64, requires_grad=True)
    frozen = backbone.native(context)
    (frozen_gradient,) = torch.autograd.grad(frozen.square().sum(), context)
    with backbone.unfrozen():
        trained = backbone.native(context)
        (trained_gradient,) = torch.autograd.grad(trained.square().sum(), context)
    torch.testing.assert_close(frozen, trained, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(frozen_gradient, trained_gradient, rtol=1e-9, atol=1e-9)


def test_a_graph_may_be_walked_twice() -> None:
    context = torch.tensor(series(96), requires_grad=True)
    total = load_backbone("fracast", context_length=96).native(context).sum()
    (first,) = torch.autograd.grad(total, context, retain_graph=True)
    assert torch.equal(first, torch.autograd.grad(total, context)[0])


def test_fine_tuning_reaches_every_weight_and_changes_the_forecast() -> None:
    backbone = load_backbone("fracast", context_length=96)
    context, labels = torch.tensor(series(144)).split([96, 48], dim=1)
    before = backbone(context)
    with backbone.unfrozen():
        optimizer = torch.optim.SGD(backbone.parameters(), lr=1e-3)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = backbone.loss(context, labels).mean()
            loss.backward()
            assert all(weights.grad is not None and weights.grad.abs().sum() > 0 for weights in backbone.parameters())
            optimizer.step()
            losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert not torch.equal(backbone(context), before)  # nothing stale is left from before


def test_the_loss_is_the_pinball_loss_and_bounds_that_of_a_reconstruction() -> None:
    backbone = load_backbone("fracast", context_length=96, dtype=torch.float64)
    windows = torch.tensor(series(144), dtype=torch.float64)
    first, second = windows, windows.flip(0)
    a, b = 0.7, 1.1
    losses = [backbone.loss(each[:, :96], each[:, 96:]) for each in (first, second)]
    levels = torch.tensor(backbone.quantile_levels, dtype=torch.float64)
    quantiles = [backbone.native(each[:, :96]) for each in (first, second)]
    error = first[:, 96:, None] - quantiles[0]
    torch.testing.assert_close(losses[0][:, 0], torch.where(error > 0, levels, levels - 1).mul(error).mean((1, 2)))
    error = ((first - second)[:, 96:, None] - (quantiles[0] - quantiles[1].flip(-1))) / (a + b)
    reconstructed = torch.where(error > 0, levels, levels - 1).mul(error).mean((1, 2))
    assert (reconstructed <= (losses[0] + losses[1])[:, 0] / (a + b) + 1e-12).all()


def test_a_constant_series_is_forecast_about_its_constant_with_finite_gradients() -> None:
    context = torch.full((2, 512), 7.0, requires_grad=True)
    quantiles = load_backbone("fracast").native(context)
    quantiles.sum().backward()
    assert context.grad is not None
    assert torch.isfinite(context.grad).all()
    torch.testing.assert_close(quantiles, torch.full_like(quantiles, 7.0), rtol=0, atol=1e-3)


def test_reduced_precision_runs_and_stays_close() -> None:
    context = torch.tensor(series(128))
    exact = load_backbone("fracast", context_length=128)(context)
    reduced = load_backbone("fracast", context_length=128, dtype=torch.bfloat16)(context)
    assert reduced.dtype == torch.float32  # that of the context
    assert ((reduced - exact).abs().amax(1) < 0.1 * (context.amax(1) - context.amin(1))).all()


def test_autocasting_leaves_the_frozen_ladder_in_its_own_precision() -> None:
    context = torch.tensor(series(128), requires_grad=True)
    backbone = load_backbone("fracast", context_length=128)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        forecast = backbone(context)
        forecast.sum().backward()
    assert context.grad is not None
    assert torch.isfinite(context.grad).all()


def test_periods_are_found_and_noise_has_none() -> None:
    time = torch.arange(512)
    noise = torch.randn(512, generator=torch.Generator().manual_seed(0))
    both = torch.sin(2 * torch.pi * time / 16) + 0.7 * torch.sin(2 * torch.pi * time / 64)
    periods = significant_periods(torch.stack([both, noise]), 512, FracastConfig())
    assert periods[0].tolist() == [16, 64, 0, 0]
    assert periods[1].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("length", [0, 7, 2049])
def test_a_context_length_out_of_range_is_refused(length: int) -> None:
    with pytest.raises(SettingError, match=f"context_length={length}.*between 8 and 2048"):
        load_backbone("fracast", context_length=length)


def copied(directory: Path) -> Path:
    shutil.copytree(WEIGHTS, directory)
    return directory


def test_a_directory_with_the_packages_files_loads(tmp_path: Path) -> None:
    backbone = load_backbone(f"fracast:{copied(tmp_path / 'release')}")
    assert backbone.fingerprint() == load_backbone("fracast").fingerprint()
    assert load_backbone(backbone.spec).fingerprint() == backbone.fingerprint()


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_missing_or_damaged_file_is_named(tmp_path: Path, file: str) -> None:
    directory = copied(tmp_path / "release")
    (directory / file).write_bytes(b"{ not what it should be")
    with pytest.raises(CheckpointError, match=file):
        load_backbone(f"fracast:{directory}")
    (directory / file).unlink()
    with pytest.raises(CheckpointError, match=f"{file} is missing"):
        load_backbone(f"fracast:{directory}")


def test_a_missing_foreign_or_misshapen_tensor_is_named(tmp_path: Path) -> None:
    directory = copied(tmp_path / "release")
    state = load_file(WEIGHTS / "model.safetensors")
    for changed, message in (
        ({k: v for k, v in state.items() if k != "head.queries"}, "'head.queries' is missing"),
        (state | {"head.extra": torch.zeros(1)}, "'head.extra' is not one"),
        (state | {"head.queries": torch.zeros(2, 2)}, r"'head.queries' has shape \[2, 2\], .* \[48, 64\]"),
    ):
        save_file(changed, directory / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            load_backbone(f"fracast:{directory}")


def test_a_variant_of_the_architecture_is_refused_by_name(tmp_path: Path) -> None:
    directory = copied(tmp_path / "release")
    config = json.loads((directory / "config.json").read_text())
    config["model"]["share_stages"] = False
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="share_stages=False is not supported"):
        load_backbone(f"fracast:{directory}")


def test_a_name_that_is_no_directory_and_a_revision_are_refused() -> None:
    with pytest.raises(CheckpointError, match="nowhere is not a directory"):
        load_backbone("fracast:nowhere")
    with pytest.raises(SettingError, match="revision='v1'"):
        load_backbone("fracast:nowhere@v1")


def test_the_default_configuration_has_the_published_size() -> None:
    assert sum(weights.numel() for weights in FracastModel(FracastConfig()).parameters()) == 85_001
