"""What an adapter is: between the channels of a window and the series of a frozen univariate model.

An adapter writes a window of channels as univariate series for the backbone (`encode`), rebuilds the channels from the
backbone's forecasts (`decode`), and says what training minimises (`objective`). Everything else (training,
evaluation, forecasting) is the same for all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from dualweaver.backbones import Backbone, Forecast
from dualweaver.compute.plan import Plan

__all__ = ["Adapter", "own_loss", "to_series"]


class Adapter(nn.Module, ABC):
    """Between the channels of a window and the series of a univariate backbone.

    Args:
        channels: channels of a window.
        targets: positions of those to forecast.

    Attributes:
        native_loss: whether `objective` is made of the backbone's own loss, rather than of the forecast's error.
        needs_reference: whether `objective` compares with the untouched backbone's error on the same windows.
        trains_backbone: whether the backbone's weights are trained as well.
        weights: how much each target counts in the training loss and in the choice of epochs, `[target]`.
        plan: how it is trained within a memory budget; None where there is none.
        pairs_at_once, series_at_once: pairs of surrogates that may keep their activations for a backward pass, and
            series that go through the backbone without one, where a plan limits them (see `dualweaver.planning`).
    """

    name: ClassVar[str]
    native_loss: bool = False
    needs_reference: bool = False
    trains_backbone: ClassVar[bool] = False
    plan: Plan | None = None
    pairs_at_once: int | None = None
    series_at_once: int | None = None

    def __init__(self, channels: int, targets: Sequence[int]) -> None:
        super().__init__()
        self.channels = channels
        self.register_buffer("targets", torch.as_tensor(list(targets), dtype=torch.long), persistent=False)
        self.register_buffer("weights", torch.ones(len(targets)), persistent=False)

    targets: Tensor
    weights: Tensor

    @property
    @abstractmethod
    def series_per_window(self) -> int:
        """How many series the backbone forecasts for one window."""

    @property
    def series_per_step(self) -> int:
        """How many of a window go through the backbone in one step of training."""
        return self.series_per_window

    @abstractmethod
    def encode(self, x: Tensor) -> Tensor:
        """`[batch, time, channel]` to the series that the backbone forecasts, `[series, time]`."""

    @abstractmethod
    def decode(self, forecasts: Tensor) -> Tensor:
        """`[series, horizon]` to `[batch, horizon, target]`."""

    @abstractmethod
    def decode_quantiles(self, quantiles: Tensor) -> Tensor | None:
        """`[series, horizon, level]` to `[batch, horizon, target, level]`; None where quantiles do not carry over.

        The levels are symmetric around one half.
        """

    @abstractmethod
    def objective(
        self, backbone: Backbone, window: Tensor, context_length: int, horizon: int, reference: Tensor | None
    ) -> Tensor:
        """The training loss of one batch.

        Args:
            backbone: frozen, unless `trains_backbone`.
            window: the context and `future_steps` after it, `[batch, time, channel]`.
            context_length: steps of the window that are context.
            horizon: steps to forecast.
            reference: what `reference_loss` gave for these windows; None unless `needs_reference`.
        """

    def reference_loss(self, backbone: Backbone, window: Tensor, context_length: int, horizon: int) -> Tensor:
        """The untouched backbone's error on the same windows, in the measure of `objective`: `[batch, target]`.

        It depends on the window and the frozen backbone only, so that it can be computed once and kept.
        """
        raise NotImplementedError(f"{self.name!r} compares with no reference")

    def future_steps(self, backbone: Backbone, horizon: int) -> int:
        """Steps after the context that a training window must hold; the backbone's own loss may look further."""
        return max(horizon, backbone.label_horizon(horizon)) if self.native_loss else horizon

    def forward(self, backbone: Backbone, x: Tensor, horizon: int) -> Tensor:
        """Point forecast: `[batch, time, channel]` to `[batch, horizon, target]`."""
        return self.decode(self._limited(partial(backbone, horizon=horizon), self.encode(x)))

    def distribution(
        self, backbone: Backbone, x: Tensor, horizon: int, generator: torch.Generator | None = None
    ) -> Forecast:
        """Point forecast `[batch, horizon, target]` and, where both sides have them, quantiles with a last axis."""
        forecast = backbone.distribution(self.encode(x), horizon, generator=generator)
        quantiles = None if forecast.quantiles is None else self.decode_quantiles(forecast.quantiles)
        return Forecast(self.decode(forecast.mean), quantiles, () if quantiles is None else forecast.levels)

    def weighted_mean(self, errors: Tensor) -> Tensor:
        """The mean of errors `[..., target]`, in which every target counts as `weights` say."""
        return (errors * self.weights).mean() / self.weights.mean()

    def project(self) -> None:
        """Bring parameters back into their domain after an optimizer step."""

    def _limited(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """`function(*tensors)`, series by series, on no more of them at once than a plan allows."""
        rows = self.series_at_once
        if rows is None or len(tensors[0]) <= rows or torch.is_grad_enabled():
            return function(*tensors)
        pieces = zip(*(tensor.split(rows) for tensor in tensors), strict=True)
        return torch.cat([function(*piece) for piece in pieces])

    def _own(self, windows: Tensor) -> Tensor:
        return windows.index_select(-1, self.targets)

    def _own_series(self, windows: Tensor) -> Tensor:
        return to_series(self._own(windows))

    def _per_target(self, series: Tensor) -> Tensor:
        """One series a target back to windows: `[batch * target, ...]` to `[batch, target, ...]`."""
        return series.view(-1, len(self.targets), *series.shape[1:])


def to_series(windows: Tensor) -> Tensor:
    """`[..., batch, time, channel]` to one series a row, `[... * batch * channel, time]`."""
    return windows.transpose(-1, -2).reshape(-1, windows.shape[-2])


def own_loss(
    backbone: Backbone,
    encode: Callable[[Tensor], Tensor],
    window: Tensor,
    context_length: int,
    horizon: int,
    generator: torch.Generator | None,
) -> Tensor:
    """The backbone's own loss, averaged over positions: `[series]`.

    Context and labels are encoded apart, as published: a fusion module that looks around sees no future.
    """
    labels = window[:, backbone.label_start(context_length) : context_length + backbone.label_horizon(horizon)]
    losses = backbone.loss(encode(window[:, :context_length]), encode(labels), horizon=horizon, generator=generator)
    return losses.mean(dim=1)
