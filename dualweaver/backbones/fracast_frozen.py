"""The dilation ladder of Fracast with frozen weights, for which only the gradient to the input is wanted.

All training of the method goes through here, and plain autograd would spend more time on moving activations through
memory than on computing them. So this is one autograd function that
- takes the series in chunks whose activations stay in the processor's cache,
- folds what is constant: norm weights and conditioning into the neighbouring products, biases into each other,
- keeps one normalised activation a stage and recomputes the rest of the stage in the backward pass.

Notation: unit(v) = v / sqrt(mean(v^2) + eps) over the width. A stage maps x to y = unit(v) by
w = scale * x + shift, z = unit(w + pw(conv(w))), u = up(z), v = norm1 * z + down(silu(gate) * value), u = [gate, value].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["FrozenLadder"]

_CHUNK = 1024  # positions a thread: u has 192 floats a position and should fit the second-level cache
_CHUNK_ACCELERATOR = 1 << 17


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
        eps: of the norms.
    """

    taps: tuple[Tensor, Tensor, Tensor]
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
    eps: float

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
        return (slice(first, first + step) for first in range(0, len(x), step))

    def climb(self, x: Tensor, kept: list[tuple[Tensor, Tensor]] | None = None) -> tuple[Tensor, Tensor]:
        """All stages for one chunk; every unit and its factor are appended to `kept`."""
        for stage in range(len(self.dilations)):
            z, _, u = self._enter(x, stage)
            x, factor = self._leave(z, u)
            if kept is not None:
                kept.append((x, factor))
        x = x * self.norm2
        if self.norm:
            factor = _unit_(x, self.eps)
            if kept is not None:
                kept.append((x, factor))
        return x.mean(dim=1), x[:, -self.tail :].clone()

    def descend(self, x: Tensor, kept: list[tuple[Tensor, Tensor]], mean_grad: Tensor, tail_grad: Tensor) -> Tensor:
        """Gradient to the input `x` of one chunk from what `climb` kept and the gradients to its two results."""
        length = kept[-1][0].shape[1]
        grad = (mean_grad / length)[:, None].repeat(1, length, 1)
        grad[:, -self.tail :] += tail_grad
        if self.norm:
            _unit_backward_(grad, *kept[-1])
        grad *= self.norm2
        for stage in reversed(range(len(self.dilations))):
            _unit_backward_(grad, *kept[stage])
            grad = self._backward_(grad, kept[stage - 1][0] if stage else x, stage)
        return grad

    def _enter(self, x: Tensor, stage: int) -> tuple[Tensor, Tensor, Tensor]:
        """First half of a stage: z `[series, time, width]`, its factor, and u `[series * time, 2 * hidden]`."""
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
        factor = _unit_(z, self.eps)
        return z, factor, torch.addmm(self.up_bias, flat, self.up)

    def _leave(self, z: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """Second half of a stage: y `[series, time, width]` and its factor."""
        gate, value = u.chunk(2, dim=1)
        v = torch.addcmul(self.down_bias, z, self.norm1)
        v.flatten(0, 1).addmm_(F.silu(gate).mul_(value), self.down)
        return v, _unit_(v, self.eps)

    def _backward_(self, grad: Tensor, x: Tensor, stage: int) -> Tensor:
        """Gradient to x from the gradient to v, which is overwritten."""
        z, factor, u = self._enter(x, stage)
        gate, value = u.chunk(2, dim=1)
        flat = grad.flatten(0, 1)
        hidden_grad = flat @ self.down.t()
        gate_grad = hidden_grad * value
        torch.mul(hidden_grad, F.silu(gate), out=value)
        torch.ops.aten.silu_backward.grad_input(gate_grad, gate, grad_input=gate)  # u is its own gradient now
        flat.mul_(self.norm1).addmm_(u, self.up.t())
        _unit_backward_(grad, z, factor)
        conv_grad = (flat @ self.pw.t()).view_as(grad)
        start, length = self.starts[stage], x.shape[1]
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
        ends = []
        for rows in ladder.chunks(x):
            pairs: list[tuple[Tensor, Tensor]] = []
            ends.append(ladder.climb(x[rows], pairs))
            kept += [tensor for pair in pairs for tensor in pair]
        ctx.ladder = ladder
        ctx.save_for_backward(x, *kept)
        return torch.cat([mean for mean, _ in ends]), torch.cat([tail for _, tail in ends])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, mean_grad: Tensor, tail_grad: Tensor) -> tuple[Tensor, None]:
        x, *kept = ctx.saved_tensors
        ladder: FrozenLadder = ctx.ladder
        pairs = list(zip(kept[::2], kept[1::2], strict=True))
        depth = len(ladder.dilations) + ladder.norm
        grad = torch.empty_like(x)
        for chunk, rows in enumerate(ladder.chunks(x)):
            own = pairs[chunk * depth : (chunk + 1) * depth]
            grad[rows] = ladder.descend(x[rows], own, mean_grad[rows], tail_grad[rows])
        return grad, None


def _unit_(v: Tensor, eps: float) -> Tensor:
    """Divide by the root of the mean square over the last axis, in place; returns the factor."""
    factor = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    factor.square_().div_(v.shape[-1]).add_(eps).rsqrt_()
    v.mul_(factor)
    return factor


def _unit_backward_(grad: Tensor, unit: Tensor, factor: Tensor) -> None:
    """Turn the gradient to a unit into the one to what was normalised, in place."""
    along = (grad * unit).mean(dim=-1, keepdim=True)
    grad.addcmul_(unit, along, value=-1).mul_(factor)
