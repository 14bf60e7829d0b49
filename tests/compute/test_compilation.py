"""Training through `torch.compile`, and without it where it fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch
from small_backbones import FACTORIES
from torch import Tensor
from toy_backbones import LinearToy
from toys import waves, weaver

from dualweaver.adapters import DualWeaverAdapter
from dualweaver.compute.compilation import compiled

pytestmark = pytest.mark.usefixtures("one_thread")


def refuse(function: Callable[..., Any]) -> Callable[..., Any]:
    raise RuntimeError("no compiler\nin sight")


def fail_late(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no compiler\nin sight")

    return run


@pytest.mark.parametrize("objective", ["reconstruction", "paper"])
@pytest.mark.parametrize("compiler", [refuse, fail_late])
def test_a_fit_goes_on_with_the_same_numbers_where_compiling_fails(
    compiler: Callable[..., Any], objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = weaver(objective=objective).fit(waves())
    monkeypatch.setattr(torch, "compile", compiler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted = weaver(objective=objective, compile=True).fit(waves())
    told = [str(warning.message) for warning in caught if "compile=True" in str(warning.message)]
    assert "the backbone 'module' cannot be compiled here (no compiler): it runs as it is" in told[0]
    assert len(told) <= 2  # once for forecasts, once for losses
    pd.testing.assert_frame_equal(fitted.history_, expected.history_)
    pd.testing.assert_frame_equal(fitted.predict(), expected.predict())


def test_training_is_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def count(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls.append(function.__name__)
            return function(*args, **kwargs)

        return run

    monkeypatch.setattr(torch, "compile", count)
    weaver(compile=True, adapter="fine-tune", learning_rate=1e-3).fit(waves())
    weaver().fit(waves())
    assert calls == []
    fitted = weaver(compile=True).fit(waves())
    trained = len(calls)
    assert trained >= 2 * len(fitted.history_)
    fitted.predict()
    assert len(calls) == trained


def test_an_error_of_the_model_itself_stays_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function: function)
    with compiled(LinearToy()) as backbone, pytest.raises(ValueError, match="the context has 3 steps"):
        backbone(torch.zeros(2, 3))


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["reconstruction", "paper"])
@pytest.mark.parametrize("name", ["module", "ttm", "timer"])
def test_compiled_losses_and_gradients_are_those_of_the_plain_backbone(
    name: str, objective: str, recwarn: pytest.WarningsRecorder
) -> None:
    """Needs a C++ compiler."""
    torch.manual_seed(0)
    backbone = FACTORIES[name]().freeze()
    adapter = DualWeaverAdapter(3, range(3), objective=objective, dropout=0.0)
    context, horizon = backbone.context_length, backbone.native_horizon
    window = torch.randn(4, context + max(horizon, backbone.label_horizon(horizon)), 3)
    reference = adapter.reference_loss(backbone, window, context, horizon) if adapter.needs_reference else None

    def course() -> list[Tensor]:
        loss = adapter.objective(backbone, window, context, horizon, reference)
        return [loss, *torch.autograd.grad(loss, list(adapter.parameters()))]

    expected = course()
    with compiled(backbone):
        torch.testing.assert_close(course(), expected, rtol=1e-3, atol=1e-5)
    assert not any("compile=True" in str(warning.message) for warning in recwarn)
