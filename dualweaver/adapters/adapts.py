"""The linear adapter that the method is compared with."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from dualweaver.adapters.base import Adapter, to_series
from dualweaver.backbones import Backbone
from dualweaver.method import fusion_width

__all__ = ["AdaPTS"]


class AdaPTS(Adapter):
    """A linear encoder into latent channels, the frozen model on each, a linear decoder back (arXiv 2502.10235).

    The encoder and decoder first learn to reproduce the channels (`reconstruction_loss`), then to forecast through the
    frozen model.
    """

    name = "adapts"

    def __init__(self, channels: int, targets: Sequence[int], *, latent: int | None = None) -> None:
        super().__init__(channels, targets)
        self.latent = latent or fusion_width(channels)
        self.encoder = nn.Linear(channels, self.latent)
        self.decoder = nn.Linear(self.latent, len(targets))

    @property
    def series_per_window(self) -> int:
        return self.latent

    def encode(self, x: Tensor) -> Tensor:
        return to_series(self.encoder(x))

    def decode(self, forecasts: Tensor) -> Tensor:
        return self.decoder(forecasts.view(-1, self.latent, forecasts.shape[1]).transpose(1, 2))

    def decode_quantiles(self, quantiles: Tensor) -> None:
        return None  # a sum of latent quantiles is not a quantile of the sum

    def objective(
        self, backbone: Backbone, window: Tensor, context_length: int, horizon: int, reference: Tensor | None
    ) -> Tensor:
        future = self._own(window[:, context_length : context_length + horizon])
        return self.weighted_mean((self(backbone, window[:, :context_length], horizon) - future).square())

    def reconstruction_loss(self, x: Tensor) -> Tensor:
        """Squared error of decoder(encoder(x)) against x, `[..., channel]`, for the first phase."""
        return nn.functional.mse_loss(self.decoder(self.encoder(x)), self._own(x))
