"""The frozen model in bfloat16, everything around it in float32."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from test_backbone_conformance import FACTORIES
from toys import Toy, refusal, waves, weaver

from dualweaver import DualWeaver, precision
from dualweaver.precision import load_in_precision


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    """A small Timer on disk."""
    torch.manual_seed(0)
    FACTORIES["timer"]().model.save_pretrained(tmp_path / "timer")  # type: ignore[operator, union-attr]
    return f"timer:{tmp_path / 'timer'}"


@pytest.mark.parametrize("name", FACTORIES)
def test_every_backbone_forecasts_in_bf16_what_it_forecasts_in_float32(name: str) -> None:
    torch.manual_seed(0)
    single = FACTORIES[name]().freeze()
    half = load_in_precision(single, "bf16")
    assert next(half.parameters()).dtype == torch.bfloat16
    assert next(single.parameters()).dtype == torch.float32
    time = torch.arange(single.context_length, dtype=torch.float32)
    context = 1000 + torch.stack([(time / 3).sin(), (time / 5).cos()])  # a level that bfloat16 would round away
    expected, ours = single.forecast(context), half.forecast(context)
    assert ours.mean.dtype == torch.float32
    torch.testing.assert_close(ours.mean - 1000, expected.mean - 1000, rtol=0.1, atol=0.1)
    context.requires_grad_()
    half(context).sum().backward()
    assert context.grad is not None
    assert context.grad.dtype == torch.float32
    assert torch.isfinite(context.grad).all()


def test_a_fit_in_bf16_trains_in_float32_and_repeats_its_bits(checkpoint: str) -> None:
    first, second = (weaver(checkpoint, context_length=48, precision="bf16").fit(waves()) for _ in range(2))
    assert next(first.pipeline_.backbone.parameters()).dtype == torch.bfloat16
    assert all(weights.dtype == torch.float32 for weights in first.pipeline_.adapter.parameters())
    pd.testing.assert_frame_equal(first.predict(), second.predict())
    exact = weaver(checkpoint, context_length=48).fit(waves())
    scores, expected = first.scores_["zero_shot_mse"], exact.scores_["zero_shot_mse"]
    np.testing.assert_allclose(scores, expected, rtol=0.01)


def test_a_saved_forecaster_loads_in_the_precision_it_was_fitted_in(checkpoint: str, tmp_path: Path) -> None:
    model = weaver(checkpoint, context_length=48, precision="bf16").fit(waves())
    model.save(tmp_path / "kept")
    assert json.loads((tmp_path / "kept" / "config.json").read_text())["backbone"]["precision"] == "bf16"
    again = DualWeaver.load(tmp_path / "kept")
    assert again.precision == "bf16"
    pd.testing.assert_frame_equal(again.predict(), model.predict())


def test_an_object_keeps_its_own_weights() -> None:
    toy = Toy()
    model = weaver(toy, precision="bf16").fit(waves())
    assert toy.weight.dtype == torch.float32
    assert next(model.pipeline_.backbone.parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize("pays", [True, False])
def test_auto_takes_bf16_for_large_products_where_they_are_faster(monkeypatch: pytest.MonkeyPatch, pays: bool) -> None:
    monkeypatch.setattr(precision, "_bf16_pays", lambda device: pays)
    expected = {"timer": pays, "sundial": pays, "ttm": False, "fracast": False, "module": False}
    for name, half in expected.items():
        weights = next(load_in_precision(FACTORIES[name](), "auto").parameters())
        assert (weights.dtype == torch.bfloat16) == half, name


def test_the_measurement_of_auto_is_made_once() -> None:
    precision._bf16_pays.cache_clear()
    assert precision._bf16_pays("cpu") is precision._bf16_pays("cpu")
    assert precision._bf16_pays.cache_info().misses == 1


def test_weights_that_are_trained_stay_in_float32(checkpoint: str) -> None:
    assert "fine-tuning takes '32'" in refusal(weaver(precision="bf16", fine_tune=True).fit, waves())
    model = weaver(checkpoint, context_length=48, precision="auto", adapter="fine-tune", learning_rate=1e-4)
    assert next(model.fit(waves()).pipeline_.backbone.parameters()).dtype == torch.float32


def test_an_unknown_precision_is_refused_with_the_known_ones() -> None:
    assert "precision='16': expected one of 32, bf16, auto" in refusal(weaver(precision="16").fit, waves())
