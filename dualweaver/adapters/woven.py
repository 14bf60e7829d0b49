"""The method as an adapter: surrogates, reconstruction, and what training minimises."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from dualweaver.adapters.base import Adapter, own_loss, to_series
from dualweaver.backbones import Backbone
from dualweaver.compute.streaming import kept_bytes, streamed_sum
from dualweaver.errors import SettingError
from dualweaver.method import FILTER_SHARES, ContextFilter, Weaver, make_fusion, surrogate_bound

__all__ = ["DualWeaverAdapter"]

KEPT_AT_ONCE = {
    True: 3 * 2**26,
    False: 2**32,
}  # bytes of activations kept for a backward pass, on the CPU and elsewhere
SMALL = 2**16  # values of surrogates that are not worth splitting
LOSS_SEED = 2024  # of the draws of losses that sample, see `_common_draws`


def _common_draws() -> torch.Generator:
    """Randomness for losses that sample: the same for every series, window and step (sample average approximation).

    The errors on x and on its surrogates are then compared under the same draws, and the error on x is a constant.
    """
    return torch.Generator().manual_seed(LOSS_SEED)


def _weighted_sum(losses: Callable[..., Tensor], pairs: Tensor, weight: Tensor, *others: Tensor) -> Tensor:
    return (weight * losses(pairs, *others)).sum()


class DualWeaverAdapter(Adapter):
    """Two symmetric surrogates per target channel (arXiv 2602.22066); see `weaver`.

    Args:
        channels, targets: as for every adapter.
        fusion: "mlp" or "cnn".
        objective: "reconstruction": squared error of the rebuilt forecast, plus `regularisation` times the excess of
            the surrogates' error bound over the untouched backbone's squared error, relative to the latter. "paper":
            the published loss, mean(l1 + l2) / 2 + mean(max(upper, l0)), on the backbone's own loss.
        regularisation: weight of the collapse regulariser in "reconstruction".
        context_filter: filter contexts before they are woven (`weaver.ContextFilter`); for "reconstruction" only, the
            published method has none.
        dropout: inside fusion and filter, in training.
        channel_sample: how many targets, drawn anew at every step of training, make its loss; all where None. Drawn
            evenly and without replacement, so that the loss is an unbiased estimate of that over all. All channels feed
            the fusion. The untouched backbone's losses are still those of all targets, once a window.
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
        context_filter: bool = True,
        dropout: float = 0.1,
        channel_sample: int | None = None,
    ) -> None:
        super().__init__(channels, targets)
        if objective not in ("reconstruction", "paper"):
            raise SettingError(f"objective={objective!r}: expected 'reconstruction' or 'paper'")
        self.native_loss = objective == "paper"
        module = make_fusion(fusion, channels, len(targets), dropout=dropout)
        filtered = context_filter and not self.native_loss
        self.weaver = Weaver(module, targets, ContextFilter(channels, targets, dropout=dropout) if filtered else None)
        self.shares = FILTER_SHARES if filtered else ()  # of the filter's edit; `stages` tries them on validation
        self.regularisation = regularisation
        self.channel_sample = min(channel_sample or len(targets), len(targets))
        self._kept: dict[tuple[Any, ...], int] = {}  # bytes of a pair
        self.needs_reference = self.native_loss or regularisation > 0

    @property
    def series_per_window(self) -> int:
        return 2 * len(self.targets)

    @property
    def series_per_step(self) -> int:
        return 2 * self.channel_sample

    def encode(self, x: Tensor) -> Tensor:
        return to_series(torch.stack(self.weaver.context_surrogates(x)))

    def decode(self, forecasts: Tensor) -> Tensor:
        return self.weaver.reconstruct(*self._surrogate_forecasts(forecasts))

    def decode_quantiles(self, quantiles: Tensor) -> Tensor:
        return self.weaver.reconstruct_quantiles(*self._surrogate_forecasts(quantiles))

    def _surrogate_forecasts(self, forecasts: Tensor) -> tuple[Tensor, Tensor]:
        """`[2 * batch * target, horizon, ...]` to the two surrogates' `[batch, horizon, target, ...]`."""
        first, second = self._per_target(forecasts).transpose(1, 2).chunk(2)
        return first, second

    def objective(
        self, backbone: Backbone, window: Tensor, context_length: int, horizon: int, reference: Tensor | None
    ) -> Tensor:
        # one row a pair of surrogates: the loss is a sum over pairs, so that they can go through in pieces
        pairs = self._pairs(self.weaver.context_surrogates(window[:, :context_length]))
        tensors = [pairs, self.weights.repeat(len(window)), (self.weaver.a + self.weaver.b).repeat(len(window))]
        if self.native_loss:
            assert reference is not None
            end = context_length + backbone.label_horizon(horizon)
            labels = self.weaver.surrogates(window[:, backbone.label_start(context_length) : end])
            tensors += [self._pairs(labels), reference.flatten()]
            pair_losses = partial(_weighted_sum, partial(self._native_losses, backbone, horizon))
        else:
            later = window[:, context_length : context_length + horizon]
            tensors.append(self._own_series(later))
            if reference is not None:
                usual = reference.mean(dim=0).clamp_min(1e-6).repeat(len(window))
                tensors += [self._pairs(self.weaver.surrogates(later)), reference.flatten(), usual]
            pair_losses = partial(_weighted_sum, partial(self._reconstruction_losses, backbone, horizon))
        if self.training and self.channel_sample < len(self.targets):
            sampled = self._sampled_pairs(len(window))
            tensors = [tensor.index_select(0, sampled) for tensor in tensors]
        at_once = self._pairs_at_once(backbone, horizon, pair_losses, tensors)
        return streamed_sum(pair_losses, tensors, at_once) / (len(tensors[0]) * self.weights.mean())

    def _sampled_pairs(self, batch: int) -> Tensor:
        """Rows of the pairs of a few random targets, the same ones in all windows of a batch."""
        drawn = torch.randperm(len(self.targets))[: self.channel_sample].sort().values
        return (torch.arange(batch)[:, None] * len(self.targets) + drawn).flatten().to(self.targets.device)

    def _pairs(self, surrogates: tuple[Tensor, Tensor]) -> Tensor:
        """Surrogates of windows, `[batch, time, target]` each, to one row a target, `[batch * target, 2, time]`."""
        return self._per_surrogate(to_series(torch.stack(surrogates))).transpose(0, 1)

    @staticmethod
    def _per_surrogate(series: Tensor) -> Tensor:
        return series.unflatten(0, (2, -1))

    def _native_losses(
        self, backbone: Backbone, horizon: int, context: Tensor, scale: Tensor, labels: Tensor, reference: Tensor
    ) -> Tensor:
        """(l1 + l2) / 2 + max(upper, l0), a value a pair."""
        series, targets = (pairs.transpose(0, 1).flatten(0, 1) for pairs in (context, labels))
        losses = backbone.loss(series, targets, horizon=horizon, generator=_common_draws()).mean(dim=1)
        first, second = self._per_surrogate(losses)
        worst = torch.maximum(surrogate_bound(first, second, scale, backbone.loss_kind), reference)
        return (first + second) / 2 + worst

    def _reconstruction_losses(
        self,
        backbone: Backbone,
        horizon: int,
        context: Tensor,
        scale: Tensor,
        truth: Tensor,
        future: Tensor | None = None,
        reference: Tensor | None = None,
        usual: Tensor | None = None,
    ) -> Tensor:
        """Squared error and the bound's excess over `reference`, as a share of the `usual` one; a value a pair."""
        first, second = self._per_surrogate(backbone(context.transpose(0, 1).flatten(0, 1), horizon))
        error = ((first - second) / scale[:, None] - truth).square().mean(dim=1)
        if future is not None and reference is not None and usual is not None:
            one, other = ((part - future[:, at]).square().mean(dim=1) for at, part in enumerate((first, second)))
            excess = (surrogate_bound(one, other, scale, "squared") - reference).relu()
            error = error + self.regularisation * excess / usual
        return error

    def _pairs_at_once(
        self, backbone: Backbone, horizon: int, losses: Callable[..., Tensor], tensors: Sequence[Tensor]
    ) -> int:
        """How many pairs may keep their activations; a function of sizes alone, so that bits can be repeated."""
        pairs, weights = tensors[0], list(backbone.parameters())
        if self.pairs_at_once is not None:
            return self.pairs_at_once
        if pairs.numel() < SMALL or not torch.is_grad_enabled() or any(weight.requires_grad for weight in weights):
            return len(pairs)
        sizes = (backbone.name, horizon, pairs.shape[2], tuple(weight.dtype for weight in weights[:1]))
        if sizes not in self._kept:
            with torch.random.fork_rng():
                self._kept[sizes] = kept_bytes(losses, tensors, weights)
        most = max(1, KEPT_AT_ONCE[pairs.device.type == "cpu"] // max(1, self._kept[sizes]))
        return math.ceil(len(pairs) / math.ceil(len(pairs) / most))  # pieces of one size

    @torch.no_grad()
    def reference_loss(self, backbone: Backbone, window: Tensor, context_length: int, horizon: int) -> Tensor:
        if self.native_loss:
            end = context_length + backbone.label_horizon(horizon)
            losses = self._limited(
                lambda *series: backbone.loss(*series, horizon=horizon, generator=_common_draws()).mean(dim=1),
                self._own_series(window[:, :context_length]),
                self._own_series(window[:, backbone.label_start(context_length) : end]),
            )
        else:
            forecast = self._limited(partial(backbone, horizon=horizon), self._own_series(window[:, :context_length]))
            future = self._own_series(window[:, context_length : context_length + horizon])
            losses = (forecast - future).square().mean(dim=1)
        return self._per_target(losses)

    def surrogate_losses(
        self, backbone: Backbone, window: Tensor, context_length: int, horizon: int
    ) -> tuple[Tensor, Tensor]:
        """l1 and l2: the backbone's own loss on both surrogates, `[batch, target]` each."""
        losses = own_loss(backbone, self.encode, window, context_length, horizon, _common_draws())
        first, second = self._per_target(losses).chunk(2)
        return first, second

    def upper_bound(self, first: Tensor, second: Tensor, kind: Literal["squared", "absolute"]) -> Tensor:
        """Bound on the error of the reconstruction from those of the surrogates, `[batch, target]` each."""
        return surrogate_bound(first, second, self.weaver.a + self.weaver.b, kind)

    def project(self) -> None:
        self.weaver.project()
