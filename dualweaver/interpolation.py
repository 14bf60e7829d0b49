"""A share of what fine-tuning changed: weights between the untouched model's and those that training arrived at.

What the training rows teach goes too far for the rows that follow. Weights in between forecast better than either end
where the data move on, and cost nothing more (WiSE-FT, arXiv 2109.01903).
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["TRIAL_SHARE", "Interpolation"]

TRIAL_SHARE = 0.5  # at which epochs are compared, until validation says which share is best


class Interpolation:
    """The line between two models of one architecture.

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
