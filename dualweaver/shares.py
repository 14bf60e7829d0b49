"""How much of what training has found forecasts apply.

What the training rows teach goes too far for the rows that follow, as estimates without shrinkage do. So epochs are
compared at a share of it, and validation chooses which share is kept: of the edit of a context filter, or of the way
that fine-tuned weights have gone (WiSE-FT, arXiv 2109.01903). Neither costs anything when forecasting.
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["SHARES", "TRIAL_SHARE", "Interpolation"]

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
TRIAL_SHARE = 0.5  # at which epochs are compared


class Interpolation:
    """The line between the weights of two models of one architecture.

    Args:
        model: trained; its weights are what moves.
        origin: where training started; only read.
    """

    def __init__(self, model: nn.Module, origin: nn.Module) -> None:
        pairs = zip(model.parameters(), origin.parameters(), strict=True)
        self._lines = [(weight, start.detach(), weight.detach().clone()) for weight, start in pairs]

    @torch.no_grad()
    def take(self, share: float) -> None:
        """Put `model` at a share of its way from `origin`; 0 and 1 give the exact weights of both ends."""
        for weight, start, end in self._lines:
            weight.copy_(torch.lerp(start.to(weight.device), end, share))
