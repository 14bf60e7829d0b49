"""Channel by channel: the untouched model, and full fine-tuning."""

from __future__ import annotations

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
    """Full fine-tuning: the backbone's weights on its own loss, channel by channel."""

    name = "fine-tune"
    native_loss = True
    trains_backbone = True

    def objective(
        self, backbone: Backbone, window: Tensor, context_length: int, horizon: int, reference: Tensor | None
    ) -> Tensor:
        losses = own_loss(backbone, self.encode, window, context_length, horizon, generator=None)
        return self.weighted_mean(self._per_target(losses))
