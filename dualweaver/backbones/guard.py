"""What keeps a model's weak spots out of training: contexts without spread, and gradients that are not finite.

Many models divide a context by its deviation. Where that is zero their forecast may still be finite, but the gradient
to the context is not, and one such series is enough to turn all that is trained into NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["around_flat", "is_flat", "with_finite_gradient"]

_ROUNDING = 4  # spacings of the number format, at the series' level, that count as no spread


def is_flat(context: Tensor) -> Tensor:
    """Which series do not move by more than rounding: `[series, time]` to `[series]`."""
    low, high = context.detach().aminmax(dim=1)
    return high - low <= _ROUNDING * torch.finfo(context.dtype).eps * torch.maximum(high.abs(), low.abs())


def around_flat(model: Callable[[Tensor], Tensor], context: Tensor) -> Tensor:
    """`model(context)`, but a context without spread has its last value as forecast, and no gradient.

    The other series go through the model in the same batch as ever, so their numbers do not depend on this.

    Args:
        model: `[series, time]` to `[series, horizon]` or `[series, horizon, level]`.
        context: `[series, time]`.
    """
    flat = is_flat(context)
    if not torch.compiler.is_compiling() and not bool(flat.any()):
        return model(context)
    harmless = torch.linspace(-1, 1, context.shape[1], dtype=context.dtype, device=context.device)
    block = model(torch.where(flat[:, None], harmless, context))
    rows = (-1, *[1] * (block.ndim - 1))
    return torch.where(flat.view(rows), context[:, -1].detach().to(block.dtype).view(rows), block)


def with_finite_gradient(context: Tensor, report: Callable[[int, int], None]) -> Tensor:
    """The context itself, of whose gradient the entries that are not finite become zero.

    Args:
        context: `[series, time]`.
        report: told the number of such entries and of the series that have them, where there are any. Not in compiled
            code, which cannot stop to count.
    """
    if not context.requires_grad or not torch.is_grad_enabled():
        return context
    if torch.compiler.is_compiling():
        return _Cleaned.apply(context)
    view = context.view_as(context)
    view.register_hook(lambda grad: _cleaned(grad, report))
    return view


def _cleaned(grad: Tensor, report: Callable[[int, int], None]) -> Tensor:
    # one sum is cheaper than a test of every entry, and finite wherever all of them are, but for sums that overflow
    if math.isfinite(float(grad.sum())):
        return grad
    bad = ~grad.isfinite()
    count = int(bad.sum())
    if not count:
        return grad
    report(count, int(bad.any(dim=1).sum()))
    return grad.masked_fill(bad, 0)


class _Cleaned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, context: Tensor) -> Tensor:
        return context.view_as(context)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.where(grad.isfinite(), grad, torch.zeros_like(grad))
