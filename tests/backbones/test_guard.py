"""The guard around a model that is careless with contexts that do not move, or with its gradients."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from toy_backbones import CarelessToy, GuardedToy

from dualweaver.adapters import DualWeaverAdapter
from dualweaver.backbones import Backbone
from dualweaver.backbones.guard import is_flat, with_finite_gradient
from dualweaver.compute.recompute import recomputing

pytestmark = pytest.mark.usefixtures("one_thread")


def contexts(flat: float | None = 5.0) -> Tensor:
    values = torch.randn(3, 12, generator=torch.Generator().manual_seed(0))
    if flat is not None:
        values[1] = flat
    return values.requires_grad_()


class _Operations(TorchDispatchMode):
    """Counts those that compute on something as large as the context; views cost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.large: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        large = any(isinstance(value, Tensor) and value.numel() >= 3 * 12 for value in args)
        if large and func not in (torch.ops.aten.view.default, torch.ops.aten.detach.default):
            self.large[str(func)] += 1
        return func(*args, **(kwargs or {}))


def gradient(backbone: Backbone, context: Tensor, horizon: int = 10) -> Tensor:
    context.grad = None
    backbone(context, horizon).square().sum().backward()
    assert context.grad is not None
    return context.grad


@pytest.mark.parametrize("value", [0.0, 5.0, -0.1, 1e30])
@pytest.mark.parametrize("levels", [(), (0.1, 0.5, 0.9)], ids=["points", "quantiles"])
def test_a_context_that_does_not_move_never_reaches_a_guarded_model(levels: tuple[float, ...], value: float) -> None:
    backbone, context = GuardedToy(levels=levels), contexts(value)
    assert not gradient(backbone, context)[1].any()
    assert gradient(backbone, context).isfinite().all()
    assert torch.equal(backbone(context, 10)[1], torch.full((10,), value))
    forecast = backbone.forecast(context, 10)
    if levels:
        assert forecast.quantiles is not None
        assert (forecast.quantiles[1] == torch.tensor(value)).all()
    assert not any(is_flat(seen).any() for seen in backbone.seen)


def test_the_other_series_of_a_batch_keep_their_bits() -> None:
    guarded, careless = GuardedToy(), CarelessToy()
    context, moving = contexts(), contexts(None)
    assert torch.equal(guarded(context, 10)[[0, 2]], careless(moving, 10)[[0, 2]])
    assert torch.equal(gradient(guarded, context)[[0, 2]], gradient(careless, moving)[[0, 2]])
    assert torch.equal(guarded(moving, 10), careless(moving, 10))


def test_what_moves_by_rounding_alone_counts_as_constant_and_what_moves_by_more_does_not() -> None:
    level = torch.full((4, 12), 1000.0)
    level[0, 3] = torch.nextafter(level[0, 3], torch.tensor(2000.0))
    level[1, 3] += 1
    level[2] = torch.linspace(-1e-30, 1e-30, 12)
    assert is_flat(level).tolist() == [True, False, False, True]


def test_gradients_that_are_not_finite_are_zero_counted_and_told_once() -> None:
    backbone, context = CarelessToy(broken=0.5), contexts(None)
    context.data[2, 0] = 0.5
    exact = CarelessToy()
    with pytest.warns(UserWarning, match=r"'careless-toy' to its context is not finite in 1 steps of 1 series"):
        found = gradient(backbone, context, horizon=4)
    expected = gradient(exact, context, horizon=4).clone()
    expected[2, 0] = 0
    assert torch.equal(found, expected)
    assert (backbone.zeroed_gradients, exact.zeroed_gradients) == (1, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradient(backbone, context, horizon=4)
    assert backbone.zeroed_gradients == 2


def test_an_unguarded_model_forecasts_a_constant_as_ever_and_does_not_spoil_what_is_trained() -> None:
    backbone, context = CarelessToy(), contexts()
    with pytest.warns(UserWarning, match="not finite in 12 steps of 1 series"):
        found = gradient(backbone, context, horizon=4)
    assert found.isfinite().all()
    assert not found[1].any()
    assert any(is_flat(seen).any() for seen in backbone.seen)


def test_the_guard_holds_where_blocks_are_computed_again() -> None:
    backbone, context = GuardedToy(), contexts()
    expected = gradient(backbone, context).clone()
    with recomputing(backbone, ["one_block"]):
        assert torch.equal(gradient(backbone, context), expected)


@pytest.mark.parametrize("backbone", [CarelessToy(), GuardedToy()], ids=["told", "kept away"])
@pytest.mark.filterwarnings("ignore:the gradient of the backbone")
def test_training_through_a_careless_model_on_a_dead_channel_keeps_its_weights_finite(backbone: Backbone) -> None:
    torch.manual_seed(0)
    adapter = DualWeaverAdapter(3, range(3))
    window = torch.randn(4, 16, 3)
    window[:, :, 1] = 5
    adapter(backbone, window[:, :12], 4).sub(window[:, 12:]).square().mean().backward()
    grads = [weights.grad for weights in adapter.parameters() if weights.grad is not None]
    assert grads
    assert all(grad.isfinite().all() for grad in grads)


def test_a_sum_that_overflows_is_no_reason_to_change_a_gradient() -> None:
    told: list[int] = []
    x = torch.zeros(2, 3, requires_grad=True)
    with_finite_gradient(x, lambda entries, series: told.append(entries)).backward(torch.full((2, 3), 3e38))
    assert x.grad is not None
    assert (x.grad == torch.tensor(3e38)).all()
    assert not told


def test_nothing_is_wrapped_where_no_gradient_is_wanted() -> None:
    x = torch.zeros(2, 3, requires_grad=True)
    with torch.no_grad():
        assert with_finite_gradient(x, lambda *_: None) is x
    assert with_finite_gradient(x.detach(), lambda *_: None).grad_fn is None


def test_the_guard_works_in_compiled_code() -> None:
    def careless(x: Tensor) -> Tensor:
        return with_finite_gradient(x, lambda *_: None).sqrt().sum()

    x = torch.tensor([[0.0, 4.0]], requires_grad=True)
    torch.compile(careless, backend="aot_eager")(x).backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.tensor([[0.0, 0.25]]))


def test_the_guard_computes_no_more_than_the_extremes_of_a_context_and_the_sum_of_its_gradient() -> None:
    context = contexts(None)
    guarded, plain = _Operations(), _Operations()
    backbone = GuardedToy()
    with guarded:
        backbone.one_block(context).sum().backward()
    with plain:
        backbone.native(context).sum().backward()
    assert guarded.large - plain.large == {"aten.aminmax.default": 1, "aten.sum.default": 1}
