"""G, which edits the context before it is woven; ours, the published method has none."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dualweaver.method.fusion import FUSION_LIMIT

__all__ = ["FILTER_SHARES", "FILTER_STRENGTH", "ContextFilter"]

FILTER_STEPS = 512  # the most recent steps of a context, which the filter reads and edits
FILTER_RANK = 32
FILTER_SHARES = (0.25, 0.5, 0.75, 1.0)  # of what training has found, for validation to choose from
FILTER_STRENGTH = 0.5  # until it has
SPREAD_FLOOR = 0.05  # of the training rows' standard deviation: a channel that stands still keeps standing still


class ContextFilter(nn.Module):
    """Edits the context of every target before it is woven: e(x) = x + G(x); the frozen model forecasts what is edited.

    G reads the shape of each channel's recent past (its values less their mean, over their spread) as a few features,
    mixes the features of all channels, and writes an edit of the recent past in the spread of the target. Reading and
    writing are shared by all channels; mixing starts at each target's own features, and writing at zero.

    Only the last `FILTER_STEPS` steps are read and edited, so that the weights do not depend on the context's length.

    What the training rows teach goes too far for the rows that follow, as estimates without shrinkage do: training
    applies the whole edit, forecasting the share `strength` of it. A fit chooses that share on validation windows.

    Args:
        channels: of a window.
        targets: positions of the channels to edit.
        dropout: of the features, in training.
    """

    def __init__(self, channels: int, targets: Sequence[int], *, rank: int = FILTER_RANK, dropout: float = 0.1) -> None:
        super().__init__()
        self.read = nn.Linear(FILTER_STEPS, rank)
        self.mix = nn.Linear(channels, len(targets), bias=False)
        self.write = nn.Linear(rank, FILTER_STEPS, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("targets", torch.as_tensor(list(targets), dtype=torch.long), persistent=False)
        self.register_buffer("strength", torch.tensor(FILTER_STRENGTH))
        nn.init.zeros_(self.write.weight)
        with torch.no_grad():
            self.mix.weight.copy_(nn.functional.one_hot(self.targets, channels))

    targets: Tensor
    strength: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """G(x): `[batch, time, channel]` to `[batch, time, target]`."""
        x = x.clamp(-FUSION_LIMIT, FUSION_LIMIT)
        spread = x.std(dim=1, keepdim=True, correction=0) + SPREAD_FLOOR
        recent = (x[:, -FILTER_STEPS:] - x.mean(dim=1, keepdim=True)) / spread
        steps = recent.shape[1]
        features = nn.functional.linear(recent.transpose(1, 2), self.read.weight[:, -steps:], self.read.bias)
        mixed = self.dropout(nn.functional.silu(self.mix(features.transpose(1, 2))))
        edit = nn.functional.linear(mixed.transpose(1, 2), self.write.weight[-steps:]).transpose(1, 2)
        edit = edit * spread.index_select(-1, self.targets)
        if not self.training:
            edit = edit * self.strength
        return nn.functional.pad(edit, (0, 0, x.shape[1] - steps, 0))
