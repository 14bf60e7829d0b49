"""Sums over rows whose gradients are computed along with them, piece by piece.

What a backward pass needs of a large model is then kept for one piece at a time, instead of for the whole batch, at no
more work. That takes a scalar that is a sum over rows: gradients of a piece are known as soon as the piece is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["kept_bytes", "streamed_sum"]


class _Prompt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        wanted = ctx.needs_input_grad[1:]
        leaves = [t.detach().requires_grad_(want) for t, want in zip(tensors, wanted, strict=True)]
        with torch.enable_grad():
            value = function(*leaves)
        found = torch.autograd.grad(value, [leaf for leaf in leaves if leaf.requires_grad], materialize_grads=True)
        ctx.save_for_backward(*found)
        ctx.wanted = wanted
        return value.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found = iter(ctx.saved_tensors)
        return None, *(next(found) * grad if want else None for want in ctx.wanted)


def streamed_sum(function: Callable[..., Tensor], tensors: Sequence[Tensor], rows: int) -> Tensor:
    """`function(*tensors)`, computed on so many rows at a time.

    Args:
        function: from tensors, equally long along their first axis, to a scalar that is a sum over rows; trains nothing
            but the tensors.
        tensors: its arguments.
        rows: of a piece.
    """
    if len(tensors[0]) <= rows or not any(tensor.requires_grad for tensor in tensors):
        return function(*tensors)
    pieces = zip(*(tensor.split(rows) for tensor in tensors), strict=True)
    return torch.stack([_Prompt.apply(function, *piece) for piece in pieces]).sum()


def kept_bytes(function: Callable[..., Tensor], tensors: Sequence[Tensor], weights: Iterable[Tensor]) -> int:
    """What autograd keeps of one row for a backward pass, apart from the `weights` that all rows share."""
    row = [tensor[:1].detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
    shared = {weight.untyped_storage().data_ptr() for weight in weights}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in shared:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        value = function(*row)  # alive until the end, so that no storage is counted under another one's address
    del value
    return sum(kept.values())
