"""Backbones small enough to know everything about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dualweaver.backbones import Backbone, Forecast

__all__ = ["CarelessToy", "GuardedToy", "LinearToy", "NormalisedToy", "TogetherToy"]


class _Toy(Backbone):
    def __init__(self, context: int, horizon: int, levels: Sequence[float] = ()) -> None:
        super().__init__(
            context_length=context,
            native_horizon=horizon,
            min_context=context,
            max_context=context,
            quantile_levels=levels,
        )

    @classmethod
    def from_checkpoint(cls, checkpoint: str | None, **kwargs: Any) -> Backbone:
        raise NotImplementedError


class LinearToy(_Toy):
    """Linear and affine-equivariant: weighted means of the context, or a copy of its last steps."""

    name = "linear-toy"

    def __init__(self, context: int = 12, horizon: int = 4, *, copies: bool = False, seed: int = 0) -> None:
        super().__init__(context, horizon)
        weights = torch.rand(horizon, context, generator=torch.Generator().manual_seed(seed))
        if copies:
            weights = torch.eye(context)[-horizon:]
        self.weights = nn.Parameter(weights.double() / weights.double().sum(dim=1, keepdim=True))
        self.freeze()

    def native(self, context: Tensor) -> Tensor:
        return context @ self.weights.T.to(context.dtype)


class NormalisedToy(_Toy):
    """Instance-normalised and not linear, with dropout in training; quantiles where levels are given."""

    name = "normalised-toy"

    def __init__(self, context: int = 12, horizon: int = 4, *, levels: Sequence[float] = (), seed: int = 0) -> None:
        super().__init__(context, horizon, levels)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.hidden = nn.Linear(context, 16)
            self.head = nn.Linear(16, horizon * max(1, len(levels)))
        self.dropout = nn.Dropout(0.5)
        self.block = (horizon, len(levels)) if levels else (horizon,)
        self.freeze()

    def native(self, context: Tensor) -> Tensor:
        mean = context.mean(dim=1, keepdim=True)
        scale = context.std(dim=1, keepdim=True, correction=0) + 1e-9
        output = self.head(self.dropout(torch.tanh(self.hidden((context - mean) / scale))))
        return (output * scale + mean).unflatten(1, self.block)


class CarelessToy(_Toy):
    """Divides by the plain deviation: finite forecasts of a constant, NaN gradients; NaN too where step 0 is `broken`.

    `seen` holds the contexts that its forward was given.
    """

    name = "careless-toy"

    def __init__(
        self, context: int = 12, horizon: int = 4, *, levels: Sequence[float] = (), broken: float = 99
    ) -> None:
        super().__init__(context, horizon, levels)
        self.inner = NormalisedToy(context, horizon, levels=levels)
        self.broken = broken
        self.seen: list[Tensor] = []
        self.freeze()

    def native(self, context: Tensor) -> Tensor:
        self.seen.append(context.detach())
        mean = context.mean(dim=1, keepdim=True)
        deviation = (context - mean).square().mean(dim=1, keepdim=True).sqrt()
        scaled = (context - mean) / torch.where(deviation == 0, 1, deviation)
        trap = (context[:, :1] - self.broken).abs().sqrt()
        output = self.inner.native(scaled + 0 * trap)
        rows = (-1, *[1] * (output.ndim - 1))
        return output * deviation.view(rows) + mean.view(rows)


class GuardedToy(CarelessToy):
    """The same, with contexts that do not move kept away from it."""

    name = "guarded-toy"
    flat_is_constant = True


class TogetherToy(NormalisedToy):
    """Adds the mean of all channels to each of them before it forecasts them, where it is given them together."""

    name = "together-toy"
    multivariate = True

    def joint(self, windows: Tensor, horizon: int | None = None) -> Forecast:
        mixed = windows + windows.mean(dim=2, keepdim=True)
        return self.distribution(mixed.transpose(1, 2).flatten(0, 1), horizon)
