"""Matrix products with frozen weights: the fastest that PyTorch brings, and no work for weight gradients.

On x86 processors PyTorch hands float32 products to a library that is twice as slow as oneDNN on some of them (AMD) and
no faster on the others, while it hands bfloat16 products to oneDNN anyway. The operation used here is the one that
`torch.compile` inserts for frozen weights. `torch.backends.mkldnn.flags(enabled=False)` switches it off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

__all__ = ["FLOP_FORMULAS", "Linear", "product"]

_X86 = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def _flops(x: torch.Size, weight: torch.Size, *rest: Any, **named: Any) -> int:
    return 2 * x.numel() * weight[0]


# for `torch.utils.flop_counter`, which does not know the operation
FLOP_FORMULAS: dict[Any, Callable[..., int]] = {torch.ops.mkldnn._linear_pointwise: _flops} if _X86 else {}


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` outside of autograd: `[..., input]` and `[output, input]` to `[..., output]`."""
    if _X86 and x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() and torch.backends.mkldnn.enabled:
        return (_opaque if torch.compiler.is_compiling() else _onednn)(x, weight, bias)
    return F.linear(x, weight, bias)


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


# `torch.compile` would look into the operation, and fail on weights that it does not know as constants
@torch.library.custom_op("dualweaver::product", mutates_args=())
def _opaque(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _onednn(x, weight, bias)


@_opaque.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return product(grad, weight.t()), None, None


class Linear(nn.Linear):
    """`nn.Linear` that is faster while its weights are frozen."""

    def forward(self, input: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return product(input, self.weight, self.bias)
        if any(weight.requires_grad for weight in self.parameters()) or not input.requires_grad:
            return super().forward(input)
        return _Product.apply(input, self.weight, self.bias)
