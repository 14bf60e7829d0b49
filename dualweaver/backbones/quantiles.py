"""What backbones that forecast quantiles have in common."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dualweaver.backbones.base import Backbone

__all__ = ["QuantileBackbone", "empirical_quantiles"]


class QuantileBackbone(Backbone):
    """A backbone whose blocks are `[series, native_horizon, level]` and whose own loss is the pinball loss."""

    loss_kind = "absolute"

    def loss(
        self, context: Tensor, labels: Tensor, *, horizon: int | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Pinball loss, averaged over the horizon and the levels, in the units of the context: `[series, 1]`.

        For a pair of surrogates it bounds that of the reconstruction: the pinball at tau is subadditive and that of -u
        at tau is that of u at 1 - tau, and the levels are symmetric, so (loss1 + loss2) / (a + b) is an upper bound.
        """
        del generator
        quantiles = self._roll(context, horizon or labels.shape[1])
        levels = torch.tensor(self.quantile_levels, dtype=quantiles.dtype, device=quantiles.device)
        error = labels[..., None] - quantiles
        return torch.maximum(levels * error, (levels - 1) * error).mean(dim=(1, 2))[:, None]


def empirical_quantiles(samples: Tensor, levels: Sequence[float]) -> Tensor:
    """Linear interpolation between order statistics: `[series, sample, time]` to `[series, time, level]`.

    `torch.quantile` does the same but refuses more than 16 million numbers.
    """
    ordered = samples.sort(dim=1).values
    positions = torch.tensor(levels, dtype=torch.float64) * (samples.shape[1] - 1)
    below = positions.floor().long()
    above = positions.ceil().long()
    share = (positions - below).to(samples)[:, None]
    return torch.lerp(ordered[:, below], ordered[:, above], share).transpose(1, 2)
