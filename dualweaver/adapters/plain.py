"""Channel by channel: the untouched model, and full fine-tuning; and the untouched model on all channels together."""

from __future__ import annotations

import torch
from torch import Tensor

from dualweaver.adapters.base import Adapter, own_loss
from dualweaver.backbones import Backbone, Forecast
from dualweaver.errors import SettingError

__all__ = ["FineTune", "Joint", "ZeroShot"]


class ZeroShot(Adapter):
    """The untouched backbone, channel by channel."""

    name = "zero-shot"

    @property
    def series_per_window(self) -> int:
        return len(self.targets)

    def encode(self, x: Tensor) -> Tensor:
        return self._own_series(x)

    def decode(self, forecasts: Tensor) -> Tensor:
        return self._per_target(forecasts).transpose(1, 2)

    def decode_quantiles(self, quantiles: Tensor) -> Tensor:
        return self._per_target(quantiles).transpose(1, 2)

    def objective(
        self, backbone: Backbone, window: Tensor, context_length: int, horizon: int, reference: Tensor | None
    ) -> Tensor:
        raise SettingError("adapter='zero-shot' has nothing to train")


class Joint(ZeroShot):
    """The untouched backbone, which takes all channels of a window together (`Backbone.multivariate`)."""

    name = "joint"

    @property
    def series_per_window(self) -> int:
        return self.channels

    def forward(self, backbone: Backbone, x: Tensor, horizon: int) -> Tensor:
        return self.distribution(backbone, x, horizon).mean

    def distribution(
        self, backbone: Backbone, x: Tensor, horizon: int, generator: torch.Generator | None = None
    ) -> Forecast:
        del generator
        forecast = backbone.joint(x, horizon)
        quantiles = None if forecast.quantiles is None else self._of_targets(forecast.quantiles)
        return Forecast(self._of_targets(forecast.mean), quantiles, forecast.levels)

    def objective(
        self, backbone: Backbone, window: Tensor, context_length: int, horizon: int, reference: Tensor | None
    ) -> Tensor:
        raise SettingError("adapter='joint' has nothing to train")

    def _of_targets(self, series: Tensor) -> Tensor:
        """`[batch * channel, horizon, ...]` to `[batch, horizon, target, ...]`."""
        return series.unflatten(0, (-1, self.channels)).index_select(1, self.targets).transpose(1, 2)


class FineTune(ZeroShot):
    """Full fine-tuning: the backbone's weights on its own loss, channel by channel."""

    name = "fine-tune"
    native_loss = True
    trains_backbone = True

    def objective(
        self, backbone: Backbone, window: Tensor, context_length: int, horizon: int, reference: Tensor | None
    ) -> Tensor:
        losses = own_loss(backbone, self.encode, window, context_length, horizon, generator=None)
        return self.weighted_mean(self._per_target(losses))
