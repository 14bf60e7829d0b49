"""TinyTimeMixer with frozen weights, for which only the gradient to the input is wanted.

The model is a chain of small operations, so that plain autograd spends its time on memory, on transposes and on
softmaxes over 8 numbers. This is one autograd function that
- takes the series in chunks whose activations stay in the processor's cache,
- lays them out as `[patch, series, feature]`: patch mixers are then products and softmaxes along the first axis,
  feature mixers along the last one, and nothing is transposed but where the patches change their length,
- keeps four tensors a mixer, less than half of what autograd would.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dualweaver.compute.products import product

__all__ = ["Affine", "FrozenChain", "Head", "Mixer", "Regroup", "Step"]

_CHUNK = 256  # series at most; the widest activation of the released model then takes 3 MB, shared by the threads
_CHUNK_ACCELERATOR = 1 << 14
_VECTOR = 32


class Step(Protocol):
    """One link of the chain, on `[patch, series, feature]`."""

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The output, and what `backward` needs."""

    def backward(self, grad: Tensor, kept: Sequence[Tensor]) -> Tensor:
        """Gradient to the input from the one to the output."""


@dataclass(frozen=True)
class Affine:
    """A linear map of the features."""

    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return product(x, self.weight, self.bias), ()

    def backward(self, grad: Tensor, kept: Sequence[Tensor]) -> Tensor:
        return product(grad, self.weight.t())


@dataclass(frozen=True)
class Head(Affine):
    """A linear map of all features of a series, patch by patch: `[patch, series, feature]` to `[series, horizon]`."""

    patches: int

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return product(x.transpose(0, 1).flatten(1), self.weight, self.bias), ()

    def backward(self, grad: Tensor, kept: Sequence[Tensor]) -> Tensor:
        return product(grad, self.weight.t()).unflatten(1, (self.patches, -1)).transpose(0, 1).contiguous()


@dataclass(frozen=True)
class Regroup:
    """See every patch as `factor` shorter ones of fewer features, or the other way round (row-major)."""

    factor: int
    split: bool

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self._regroup(x, self.split), ()

    def backward(self, grad: Tensor, kept: Sequence[Tensor]) -> Tensor:
        return self._regroup(grad, not self.split)

    def _regroup(self, x: Tensor, split: bool) -> Tensor:
        if self.factor == 1:
            return x
        if split:
            return x.unflatten(2, (self.factor, -1)).transpose(1, 2).flatten(0, 1)
        return x.unflatten(0, (-1, self.factor)).transpose(1, 2).flatten(2)


@dataclass(frozen=True)
class Mixer:
    """`x + h * softmax(gate(h))` with `h = down(gelu(up(norm(x))))`."""

    norm: nn.LayerNorm
    up: nn.Linear
    down: nn.Linear
    gate: nn.Linear
    along_patches: bool

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        normal, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], self.norm.weight, self.norm.bias, self.norm.eps)
        u = self._map(self._flat(normal), self.up.weight, self.up.bias)
        h = self._map(F.gelu(u), self.down.weight, self.down.bias)
        share = self._softmax(self._map(h, self.gate.weight, self.gate.bias))
        return torch.addcmul(x, h.view_as(x), share.view_as(x)), (x, mean, rstd, u, h, share)

    def backward(self, grad: Tensor, kept: Sequence[Tensor]) -> Tensor:
        x, mean, rstd, u, h, share = kept
        flat = self._flat(grad)
        gate_grad = torch._softmax_backward_data(flat * h, share, self._axis, h.dtype)
        h_grad = self._map(gate_grad, self.gate.weight.t()).addcmul_(flat, share)
        u_grad = torch.ops.aten.gelu_backward(self._map(h_grad, self.down.weight.t()), u)
        normal_grad = self._map(u_grad, self.up.weight.t()).view_as(x)
        inner = torch.ops.aten.native_layer_norm_backward(
            normal_grad, x, x.shape[-1:], mean, rstd, self.norm.weight, self.norm.bias, [True, False, False]
        )[0]
        return inner.add_(grad)

    @property
    def _axis(self) -> int:
        return 0 if self.along_patches else 1

    def _flat(self, x: Tensor) -> Tensor:
        """The axis that is mixed first or last: `[patch, series * feature]` or `[patch * series, feature]`."""
        return x.flatten(1) if self.along_patches else x.flatten(0, 1)

    def _softmax(self, scores: Tensor) -> Tensor:
        if not self.along_patches:
            return scores.softmax(dim=1)
        # the bits of a softmax along the first axis depend on how many threads share the work
        shares = (scores - scores.amax(dim=0)).exp_()
        return shares.div_(shares.sum(dim=0))

    def _map(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not self.along_patches:
            return product(x, weight, bias)
        mapped = product(weight, x.t())
        return mapped if bias is None else mapped.add_(bias[:, None])


@dataclass(frozen=True)
class FrozenChain:
    """`[series, patch, patch_length]` to `[series, horizon]`."""

    steps: Sequence[Step]

    def __call__(self, patches: Tensor) -> Tensor:
        if patches.requires_grad and torch.is_grad_enabled():
            return _Run.apply(patches, self)
        return torch.cat([self.run(patches[rows]) for rows in self.chunks(patches)])

    def chunks(self, patches: Tensor) -> Iterator[slice]:
        """Slices of the series, of about one size: a small rest would cost as many calls as a whole chunk.

        Sizes are multiples of what the processor's vectors hold, which products are fastest on.
        """
        most = _CHUNK if patches.device.type == "cpu" else _CHUNK_ACCELERATOR
        series = max(len(patches), 1)
        step = math.ceil(series / math.ceil(series / most) / _VECTOR) * _VECTOR
        return (slice(first, first + step) for first in range(0, series, step))

    def run(self, patches: Tensor, kept: list[tuple[Tensor, ...]] | None = None) -> Tensor:
        """All steps for one chunk; what the backward pass needs is appended to `kept`."""
        x = patches.transpose(0, 1).contiguous()
        for step in self.steps:
            x, own = step.forward(x)
            if kept is not None:
                kept.append(own)
        return x

    def back(self, grad: Tensor, kept: list[tuple[Tensor, ...]]) -> Tensor:
        """Gradient to the patches of one chunk; frees what was kept on the way."""
        for step in reversed(self.steps):
            grad = step.backward(grad, kept.pop())
        return grad.transpose(0, 1)


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, patches: Tensor, chain: FrozenChain) -> Tensor:
        kept: list[tuple[Tensor, ...]] = []
        ctx.chunks = list(chain.chunks(patches))
        forecast = torch.cat([chain.run(patches[rows], kept) for rows in ctx.chunks])
        ctx.chain, ctx.shape, ctx.sizes = chain, patches.shape, [len(own) for own in kept]
        ctx.save_for_backward(*(tensor for own in kept for tensor in own))
        return forecast

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, forecast_grad: Tensor) -> tuple[Tensor, None]:
        tensors = iter(ctx.saved_tensors)
        kept = [tuple(next(tensors) for _ in range(size)) for size in ctx.sizes]
        grad = forecast_grad.new_empty(ctx.shape)
        for rows in reversed(ctx.chunks):
            grad[rows] = ctx.chain.back(forecast_grad[rows], kept)
        return grad, None
