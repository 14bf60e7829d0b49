"""Channel by channel: the untouched model, and full fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dualweaver.adapters.base import Adapter, own_loss
from dualweaver.backbones import Backbone
from dualweaver.errors import SettingError

__all__ = ["FineTune", "ZeroShot"]


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


class FineTune(ZeroShot):
    """Full fine-tuning: the backbone's weights on its own loss, channel by channel.

    Args:
        channels, targets: as for every adapter.
        flips: turn every series of a training window upside down or not, at random. What a model learns of x should
            hold of -x: the data tell it twice as much, and DualWeaver, which averages over both, finds both learned.
    """

    name = "fine-tune"
    native_loss = True
    trains_backbone = True

    def __init__(self, channels: int, targets: Sequence[int], *, flips: bool = True) -> None:
        super().__init__(channels, targets)
        self.flips = flips

    def objective(
        self, backbone: Backbone, window: Tensor, context_length: int, horizon: int, reference: Tensor | None
    ) -> Tensor:
        if self.training and self.flips:
            signs = torch.randint(2, (len(window), 1, self.channels), device=window.device) * 2 - 1
            window = window * signs
        losses = own_loss(backbone, self.encode, window, context_length, horizon, generator=None)
        return self.weighted_mean(self._per_target(losses))
