"""What is trained around a frozen model, behind one small interface.

An adapter writes a window of channels as univariate series for the backbone (`encode`), rebuilds the channels from the
backbone's forecasts (`decode`), and says what training minimises (`objective`). Everything else (training,
evaluation, forecasting) is the same for all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dualweaver.backbones import Backbone, Forecast
from dualweaver.errors import SettingError
from dualweaver.weaver import Weaver, fusion_width, make_fusion, surrogate_bound

__all__ = [
    "ADAPTERS",
    "AdaPTS",
    "Adapter",
    "DualWeaverAdapter",
    "FineTune",
    "ZeroShot",
    "make_adapter",
    "reference_loss",
]


def to_series(windows: Tensor) -> Tensor:
    """`[..., batch, time, channel]` to one series a row, `[... * batch * channel, time]`."""
    return windows.transpose(-1, -2).reshape(-1, windows.shape[-2])


class Adapter(nn.Module, ABC):
    """Between the channels of a window and the series of a univariate backbone.

    Args:
        channels: channels of a window.
        targets: positions of those to forecast.

    Attributes:
        needs_reference: whether `objective` compares with the untouched backbone's error on the same window.
        trains_backbone: whether the backbone's weights are trained as well.
    """

    name: ClassVar[str]
    needs_reference: bool = False
    trains_backbone: ClassVar[bool] = False

    def __init__(self, channels: int, targets: Sequence[int]) -> None:
        super().__init__()
        self.channels = channels
        self.register_buffer("targets", torch.as_tensor(list(targets), dtype=torch.long), persistent=False)

    targets: Tensor

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
    def objective(self, backbone: Backbone, window: Tensor, context_length: int, reference: Tensor | None) -> Tensor:
        """The training loss of one batch.

        Args:
            backbone: frozen, unless `trains_backbone`.
            window: context and future, `[batch, time, channel]`.
            context_length: steps of the window that are context.
            reference: see `reference_loss`, `[batch, target]`; None unless `needs_reference`.
        """

    def forward(self, backbone: Backbone, x: Tensor, horizon: int) -> Tensor:
        """Point forecast: `[batch, time, channel]` to `[batch, horizon, target]`."""
        return self.decode(backbone(self.encode(x), horizon))

    def distribution(
        self, backbone: Backbone, x: Tensor, horizon: int, generator: torch.Generator | None = None
    ) -> Forecast:
        """Point forecast `[batch, horizon, target]` and, where both sides have them, quantiles with a last axis."""
        forecast = backbone.distribution(self.encode(x), horizon, generator=generator)
        quantiles = None if forecast.quantiles is None else self.decode_quantiles(forecast.quantiles)
        return Forecast(self.decode(forecast.mean), quantiles, () if quantiles is None else forecast.levels)

    def project(self) -> None:
        """Bring parameters back into their domain after an optimizer step."""

    def _own(self, windows: Tensor) -> Tensor:
        return windows.index_select(-1, self.targets)


def labels_of(backbone: Backbone, window: Tensor, context_length: int) -> Tensor:
    """The part of a window that the backbone's own loss compares with, `[batch, label, channel]`."""
    return window[:, backbone.label_start(context_length) :]


@torch.no_grad()
def reference_loss(adapter: Adapter, backbone: Backbone, window: Tensor, context_length: int) -> Tensor:
    """The untouched backbone's own loss per window and target channel, `[batch, target]`.

    A constant of the window and the frozen model: computed once and kept.
    """
    own = window.index_select(-1, adapter.targets)
    losses = backbone.loss(
        to_series(own[:, :context_length]),
        to_series(labels_of(backbone, own, context_length)),
        horizon=window.shape[1] - context_length,
    )
    return losses.mean(dim=1).view(len(window), -1)


class ZeroShot(Adapter):
    """The untouched backbone, channel by channel."""

    name = "zero-shot"

    def encode(self, x: Tensor) -> Tensor:
        return to_series(self._own(x))

    def decode(self, forecasts: Tensor) -> Tensor:
        return forecasts.view(-1, len(self.targets), forecasts.shape[1]).transpose(1, 2)

    def decode_quantiles(self, quantiles: Tensor) -> Tensor:
        return quantiles.view(-1, len(self.targets), *quantiles.shape[1:]).transpose(1, 2)

    def objective(self, backbone: Backbone, window: Tensor, context_length: int, reference: Tensor | None) -> Tensor:
        raise SettingError("adapter='zero-shot' has nothing to train")


class FineTune(ZeroShot):
    """Full fine-tuning: the backbone's weights on its own loss, channel by channel."""

    name = "fine-tune"
    trains_backbone = True

    def objective(self, backbone: Backbone, window: Tensor, context_length: int, reference: Tensor | None) -> Tensor:
        own = self._own(window)
        return backbone.loss(
            to_series(own[:, :context_length]),
            to_series(labels_of(backbone, own, context_length)),
            horizon=window.shape[1] - context_length,
        ).mean()


class DualWeaverAdapter(Adapter):
    """Two symmetric surrogates per target channel (arXiv 2602.22066); see `weaver`.

    Args:
        channels, targets: as for every adapter.
        fusion: "mlp" or "cnn".
        objective: "reconstruction": squared error of the rebuilt forecast, plus `regularisation` times the excess of
            the surrogates' error bound over the untouched backbone's error, relative to the latter. "paper": the
            published loss, mean(l1 + l2) / 2 + mean(max(upper, l0)), on the backbone's own loss.
        regularisation: weight of the collapse regulariser in "reconstruction".
        dropout: inside the fusion module, in training.
    """

    name = "dualweaver"

    def __init__(
        self,
        channels: int,
        targets: Sequence[int],
        *,
        fusion: str = "mlp",
        objective: str = "reconstruction",
        regularisation: float = 0.0,
        dropout: float = 0.1,
    ) -> None:
        super().__init__(channels, targets)
        if objective not in ("reconstruction", "paper"):
            raise SettingError(f"objective={objective!r}: expected 'reconstruction' or 'paper'")
        self.weaver = Weaver(make_fusion(fusion, channels, len(targets), dropout=dropout), targets)
        self.objective_name = objective
        self.regularisation = regularisation
        self.needs_reference = objective == "paper" or regularisation > 0

    def encode(self, x: Tensor) -> Tensor:
        return to_series(torch.stack(self.weaver.surrogates(x)))

    def decode(self, forecasts: Tensor) -> Tensor:
        return self.weaver.reconstruct(*self._split(forecasts))

    def decode_quantiles(self, quantiles: Tensor) -> Tensor:
        return self.weaver.reconstruct_quantiles(*self._split(quantiles))

    def _split(self, forecasts: Tensor) -> tuple[Tensor, Tensor]:
        """`[2 * batch * target, horizon, ...]` to the two surrogates' `[batch, horizon, target, ...]`."""
        both = forecasts.view(2, -1, len(self.targets), *forecasts.shape[1:]).transpose(2, 3)
        return both[0], both[1]

    def objective(self, backbone: Backbone, window: Tensor, context_length: int, reference: Tensor | None) -> Tensor:
        if self.objective_name == "paper":
            assert reference is not None
            return self._paper(backbone, window, context_length, reference)
        future = window[:, context_length:]
        first, second = self._split(backbone(self.encode(window[:, :context_length]), future.shape[1]))
        error = (self.weaver.reconstruct(first, second) - self._own(future)).square().mean()
        if not self.regularisation:
            return error
        assert reference is not None
        labels_first, labels_second = self.weaver.surrogates(future)
        bound = self._bound(
            (first - labels_first).square().mean(dim=1), (second - labels_second).square().mean(dim=1), "squared"
        )
        excess = (bound - reference).relu().mean(dim=0) / reference.mean(dim=0).clamp_min(1e-6)
        return error + self.regularisation * excess.mean()

    def _paper(self, backbone: Backbone, window: Tensor, context_length: int, reference: Tensor) -> Tensor:
        first, second = self.surrogate_losses(
            backbone, window[:, :context_length], labels_of(backbone, window, context_length), window.shape[1]
        )
        return self.paper_loss(first, second, reference, backbone)

    def surrogate_losses(
        self,
        backbone: Backbone,
        x: Tensor,
        labels: Tensor,
        window_length: int,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        """l1 and l2: the backbone's own loss on both surrogates, `[batch, target]` each."""
        losses = backbone.loss(
            self.encode(x), self.encode(labels), horizon=window_length - x.shape[1], generator=generator
        )
        first, second = losses.mean(dim=1).view(2, len(x), -1)
        return first, second

    def paper_loss(self, first: Tensor, second: Tensor, reference: Tensor, backbone: Backbone) -> Tensor:
        """mean(l1 + l2) / 2 + mean(max(upper, l0)) (paper, section 3.3)."""
        upper = self._bound(first, second, backbone.loss_kind)
        return (first.mean() + second.mean()) / 2 + torch.maximum(upper, reference).mean()

    def _bound(self, first: Tensor, second: Tensor, kind: Any) -> Tensor:
        return surrogate_bound(first, second, self.weaver.a + self.weaver.b, kind)

    def project(self) -> None:
        self.weaver.project()


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

    def encode(self, x: Tensor) -> Tensor:
        return to_series(self.encoder(x))

    def decode(self, forecasts: Tensor) -> Tensor:
        return self.decoder(forecasts.view(-1, self.latent, forecasts.shape[1]).transpose(1, 2))

    def decode_quantiles(self, quantiles: Tensor) -> None:
        return None  # a sum of latent quantiles is not a quantile of the sum

    def objective(self, backbone: Backbone, window: Tensor, context_length: int, reference: Tensor | None) -> Tensor:
        future = window[:, context_length:]
        forecast = self(backbone, window[:, :context_length], future.shape[1])
        return nn.functional.mse_loss(forecast, self._own(future))

    def reconstruction_loss(self, x: Tensor) -> Tensor:
        """Squared error of decoder(encoder(x)) against x, for the first phase."""
        return nn.functional.mse_loss(self.decoder(self.encoder(x)), self._own(x))


ADAPTERS: dict[str, type[Adapter]] = {
    adapter.name: adapter for adapter in (DualWeaverAdapter, AdaPTS, FineTune, ZeroShot)
}


def make_adapter(name: str, channels: int, targets: Sequence[int], **settings: Any) -> Adapter:
    """An adapter by name; `settings` go to its constructor."""
    if name not in ADAPTERS:
        raise SettingError(f"adapter={name!r}: expected one of {', '.join(sorted(ADAPTERS))}")
    return ADAPTERS[name](channels, targets, **settings)
