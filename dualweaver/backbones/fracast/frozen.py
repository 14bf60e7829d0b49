"""The dilation ladder of Fracast with frozen weights, for which only the gradient to the input is wanted.

All training of the method goes through here, and plain autograd would spend more time on moving activations through
memory than on computing them. So this is one autograd function that
- takes the series in chunks whose activations stay in the processor's cache,
- folds what is constant: norm weights and conditioning into the neighbouring products, biases into each other,
- keeps two units and the widest activation of a stage, about a third of what autograd would keep.

Notation: unit(v) = v / sqrt(sum(v^2) + floor) over the width, an RMS norm but for a constant. A stage maps x to
y = unit(v) by w = scale * x + shift, z = unit(w + pw(conv(w))), u = up(z) = [gate, value],
v = norm1 * z + down(silu(gate) * value).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["FrozenLadder"]

_CHUNK = 2048  # positions a thread; the widest activation, u, then takes 1.5 MB
_CHUNK_ACCELERATOR = 1 << 17


class _Kept(NamedTuple):
    """What the backward pass of a stage needs; u is `[series * time, 2 * hidden]`, factors divide the units' norms."""

    z: Tensor
    z_factor: Tensor
    u: Tensor
    y: Tensor
    y_factor: Tensor


@dataclass(frozen=True)
class FrozenLadder:
    """The folded weights of a ladder and its plan; matrices are `[input, output]`.

    Attributes:
        taps: the convolution's weights, oldest step first, `[width]` each.
        pw, pw_bias: point-wise projection; its bias includes the convolution's.
        norm1: weight of the first norm.
        up, up_bias, down, down_bias: the SwiGLU; `up` includes `norm1`.
        scale, shift: conditioning before each stage; `scale` includes the weight of the norm before it.
        norm2: weight of the last stage's norm.
        dilations, starts: of each stage; its output begins at position `start` of its input.
        norm: whether a further unit follows the last stage.
        tail: last positions wanted.
        floor: added to the sums of squares.
    """

    taps: tuple[Tensor, ...]
    pw: Tensor
    pw_bias: Tensor
    norm1: Tensor
    up: Tensor
    up_bias: Tensor
    down: Tensor
    down_bias: Tensor
    scale: list[Tensor]
    shift: list[Tensor]
    norm2: Tensor
    dilations: list[int]
    starts: list[int]
    norm: bool
    tail: int
    floor: Tensor

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`[series, time, width]` to the output's mean over time and its last `tail` positions."""
        if x.requires_grad and torch.is_grad_enabled():
            return _Climb.apply(x, self)
        ends = [self.climb(x[rows]) for rows in self.chunks(x)]
        return torch.cat([mean for mean, _ in ends]), torch.cat([tail for _, tail in ends])

    def chunks(self, x: Tensor) -> Iterator[slice]:
        """Slices of the series."""
        positions = _CHUNK * torch.get_num_threads() if x.device.type == "cpu" else _CHUNK_ACCELERATOR
        step = max(1, positions // x.shape[1])
        return (slice(first, first + step) for first in range(0, max(len(x), 1), step))

    def climb(self, x: Tensor, kept: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """All stages for one chunk; what the backward pass needs is appended to `kept`."""
        for stage in range(len(self.dilations)):
            step = self._stage(x, stage)
            x = step.y
            if kept is not None:
                kept += step
        x = x * self.norm2
        if self.norm:
            factor = _unit_(x, self.floor)
            if kept is not None:
                kept += (x, factor)
        return x.mean(dim=1), x[:, -self.tail :].clone()

    def descend(self, kept: tuple[Tensor, ...], length: int, mean_grad: Tensor, tail_grad: Tensor) -> Tensor:
        """Gradient to the input of `length` steps of one chunk, from the gradients to the two results of `climb`."""
        size = len(_Kept._fields)
        steps = [_Kept(*kept[size * stage : size * (stage + 1)]) for stage in range(len(self.dilations))]
        final = steps[-1].y.shape[1]
        grad = (mean_grad / final)[:, None].repeat(1, final, 1)
        grad[:, -self.tail :] += tail_grad
        if self.norm:
            _unit_backward_(grad, *kept[-2:])
        grad *= self.norm2
        for stage in reversed(range(len(steps))):
            grad = self._stage_backward_(grad, steps[stage], stage, steps[stage - 1].y.shape[1] if stage else length)
        return grad

    @property
    def kept_per_chunk(self) -> int:
        """Tensors that `climb` keeps."""
        return len(_Kept._fields) * len(self.dilations) + 2 * self.norm

    def _stage(self, x: Tensor, stage: int) -> _Kept:
        w = torch.addcmul(self.shift[stage], x, self.scale[stage])
        start, length = self.starts[stage], x.shape[1]
        conv = w[:, start:] * self.taps[2]
        for tap, offset in self._past(stage):
            first = max(start, offset)
            if first < length:
                conv[:, first - start :].addcmul_(w[:, first - offset : length - offset], tap)
        z = w[:, start:].contiguous()
        flat = z.flatten(0, 1)
        flat.addmm_(conv.flatten(0, 1), self.pw).add_(self.pw_bias)
        z_factor = _unit_(z, self.floor)
        u = torch.addmm(self.up_bias, flat, self.up)
        gate, value = u.chunk(2, dim=1)
        y = torch.addcmul(self.down_bias, z, self.norm1)
        y.flatten(0, 1).addmm_(F.silu(gate).mul_(value), self.down)
        return _Kept(z, z_factor, u, y, _unit_(y, self.floor))

    def _stage_backward_(self, grad: Tensor, kept: _Kept, stage: int, length: int) -> Tensor:
        """Gradient to x `[series, length, width]` from the gradient to y, which is overwritten."""
        _unit_backward_(grad, kept.y, kept.y_factor)
        gate, value = kept.u.chunk(2, dim=1)
        flat = grad.flatten(0, 1)
        hidden_grad = flat @ self.down.t()
        u_grad = torch.empty_like(kept.u)
        gate_grad, value_grad = u_grad.chunk(2, dim=1)
        torch.mul(hidden_grad, F.silu(gate), out=value_grad)
        torch.ops.aten.silu_backward.grad_input(hidden_grad.mul_(value), gate, grad_input=gate_grad)
        flat.mul_(self.norm1).addmm_(u_grad, self.up.t())
        _unit_backward_(grad, kept.z, kept.z_factor)
        conv_grad = (flat @ self.pw.t()).view_as(grad)
        start = self.starts[stage]
        w_grad = F.pad(grad, (0, 0, start, 0)) if start else grad
        w_grad[:, start:].addcmul_(conv_grad, self.taps[2])
        for tap, offset in self._past(stage):
            first = max(start, offset)
            if first < length:
                w_grad[:, first - offset : length - offset].addcmul_(conv_grad[:, first - start :], tap)
        return w_grad.mul_(self.scale[stage])

    def _past(self, stage: int) -> tuple[tuple[Tensor, int], ...]:
        """The taps of past steps and how far they reach back."""
        dilation = self.dilations[stage]
        return (self.taps[1], dilation), (self.taps[0], 2 * dilation)


class _Climb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ladder: FrozenLadder) -> tuple[Tensor, Tensor]:
        kept: list[Tensor] = []
        chunks = list(ladder.chunks(x))
        ends = [ladder.climb(x[rows], kept) for rows in chunks]
        ctx.ladder, ctx.shape, ctx.chunks = ladder, x.shape, chunks
        ctx.save_for_backward(*kept)
        return torch.cat([mean for mean, _ in ends]), torch.cat([tail for _, tail in ends])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, mean_grad: Tensor, tail_grad: Tensor) -> tuple[Tensor, None]:
        kept, ladder, size = ctx.saved_tensors, ctx.ladder, ctx.ladder.kept_per_chunk
        grad = tail_grad.new_empty(ctx.shape)
        for chunk, rows in enumerate(ctx.chunks):
            own = kept[chunk * size : (chunk + 1) * size]
            grad[rows] = ladder.descend(own, ctx.shape[1], mean_grad[rows], tail_grad[rows])
        return grad, None


def _unit_(v: Tensor, floor: Tensor) -> Tensor:
    """Divide by the root of the sum of squares over the last axis, in place; returns the factor."""
    norm = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    factor = torch.addcmul(floor, norm, norm).rsqrt_()
    v.mul_(factor)
    return factor


def _unit_backward_(grad: Tensor, unit: Tensor, factor: Tensor) -> None:
    """Turn the gradient to a unit into the one to what was normalised, in place."""
    along = (grad * unit).sum(dim=-1, keepdim=True)
    grad.sub_(unit * along).mul_(factor)
