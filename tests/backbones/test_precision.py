"""The frozen model in bfloat16, everything around it in float32."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from small_backbones import FACTORIES
from torch import Tensor, nn
from toy_backbones import LinearToy
from toys import CONTEXT, HORIZON, Toy, refusal, waves, weaver

from dualweaver import DualWeaver
from dualweaver.backbones import Backbone, precision
from dualweaver.backbones.precision import choose_precision, load_in_precision


class Levelled(LinearToy):
    """Weighs the last steps, off by what bfloat16 makes of a number of four digits."""

    large_products = True

    def __init__(self, level: float) -> None:
        super().__init__(CONTEXT, HORIZON, copies=True)
        self.weights.data = self.weights.data.float()
        self.level, self.exact = nn.Parameter(torch.tensor(level)), level
        self.freeze()

    def native(self, context: Tensor) -> Tensor:
        return super().native(context) + self.level.to(context.dtype) - self.exact


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
        weights = next(choose_precision(FACTORIES[name](), lambda model: 1.0).parameters())
        assert (weights.dtype == torch.bfloat16) == half, name


@pytest.mark.parametrize(("rounded", "half"), [(1.0009, True), (0.9991, True), (1.0011, False), (float("nan"), False)])
def test_auto_takes_bf16_where_its_validation_error_is_that_of_float32(
    monkeypatch: pytest.MonkeyPatch, rounded: float, half: bool
) -> None:
    monkeypatch.setattr(precision, "_bf16_pays", lambda device: True)

    def error(model: Backbone) -> float:
        return rounded if next(model.parameters()).dtype == torch.bfloat16 else 1.0

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        chosen = choose_precision(FACTORIES["timer"](), error)
    assert next(chosen.parameters()).dtype == (torch.bfloat16 if half else torch.float32)
    assert ["in bfloat16 and 1 in float32, which is kept" in str(told.message) for told in caught] == [True] * (
        not half
    )


@pytest.mark.parametrize(("level", "half"), [(1000.0, True), (1001.3, False)])
def test_a_fit_under_auto_keeps_float32_where_bf16_would_change_its_validation_error(
    monkeypatch: pytest.MonkeyPatch, level: float, half: bool
) -> None:
    monkeypatch.setattr(precision, "_bf16_pays", lambda device: True)
    backbone = Levelled(level)
    model = weaver(backbone, precision="auto", max_epochs=1)
    if half:
        model.fit(waves())
    else:
        with pytest.warns(UserWarning, match="precision='auto': the validation error of the 'linear-toy' backbone"):
            model.fit(waves())
    assert next(model.pipeline_.untouched.parameters()).dtype == (torch.bfloat16 if half else torch.float32)
    assert next(backbone.parameters()).dtype == torch.float32
    exact = weaver(Levelled(level), max_epochs=1).fit(waves())
    np.testing.assert_allclose(model.scores_["zero_shot_mse"], exact.scores_["zero_shot_mse"], rtol=1e-3)


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
