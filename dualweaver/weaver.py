"""The method: two symmetric surrogate series per channel, and the forecast rebuilt from their difference.

Source: DualWeaver, arXiv 2602.22066, section 3. A fusion module F mixes the channels of a window x. Two surrogates

    s1 = a * x + F(x)        s2 = -b * x + F(x)        (a, b > 0, one value per channel)

go through a frozen univariate forecaster f, and the forecast is y = (f(s1) - f(s2)) / (a + b): whatever F adds to make
the surrogates easier to forecast is subtracted again, so no decoder is needed.

For a model that is odd and scale-equivariant, as those that normalise their context nearly are, that cancellation goes
far: to first order in F the forecast does not change at all. What F cannot do, a filter of the context can: in our
default x is replaced by e(x) = x + G(x) above, where G starts at zero and F still cancels. See `ContextFilter`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from dualweaver.errors import SettingError

__all__ = ["CNNFusion", "ContextFilter", "MLPFusion", "Weaver", "fusion_width", "make_fusion", "surrogate_bound"]

FUSION_LIMIT = 1e3  # standard deviations: beyond, what F adds to other channels would drown them in float32
FILTER_STEPS = 512  # the most recent steps of a context, which the filter reads and edits
FILTER_RANK = 32
FILTER_SHARES = (0.25, 0.5, 0.75, 1.0)  # of what training has found, for validation to choose from
FILTER_STRENGTH = 0.5  # until it has
SPREAD_FLOOR = 0.05  # of the training rows' standard deviation: a channel at rest stays at rest
SCALE_FLOOR = 1e-2  # a and b stay at or above this, so that a + b never comes near zero


def fusion_width(channels: int) -> int:
    """Hidden width of a fusion module: the next power of two above the channels, between 32 and 512."""
    return min(max(2 ** (math.floor(math.log2(channels)) + 1), 32), 512)


class MLPFusion(nn.Module):
    """Point-wise in time: Linear, SiLU, dropout, Linear that starts at zero.

    `[batch, time, channel]` to `[batch, time, target]`.
    """

    def __init__(self, channels: int, targets: int | None = None, *, dropout: float = 0.1) -> None:
        super().__init__()
        width = fusion_width(channels)
        self.fc1 = nn.Linear(channels, width)
        self.dropout = nn.Dropout(dropout)
        self.fc2 = nn.Linear(width, targets or channels)
        nn.init.zeros_(self.fc2.weight)
        nn.init.zeros_(self.fc2.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.dropout(nn.functional.silu(self.fc1(x))))


class CNNFusion(nn.Module):
    """Two convolutions over five steps (replicate padding), each followed by LayerNorm, SiLU and dropout of whole time
    steps; then a Linear that starts at zero. `[batch, time, channel]` to `[batch, time, target]`.

    The convolutions see two steps ahead each: inside the context that is harmless; in a next-token loss labels near a
    token border are seen by the input, as in the published code.
    """

    def __init__(self, channels: int, targets: int | None = None, *, dropout: float = 0.1) -> None:
        super().__init__()
        width = fusion_width(channels)
        self.conv1 = nn.Conv1d(channels, width, 5, padding=2, padding_mode="replicate")
        self.norm1 = nn.LayerNorm(width)
        self.conv2 = nn.Conv1d(width, channels, 5, padding=2, padding_mode="replicate")
        self.norm2 = nn.LayerNorm(channels)
        # on [batch, time, channel] Dropout1d takes out whole time steps
        self.dropout1 = nn.Dropout1d(dropout)
        self.dropout2 = nn.Dropout1d(dropout)
        self.fc = nn.Linear(channels, targets or channels)
        nn.init.zeros_(self.fc.weight)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.conv1(x.transpose(1, 2)).transpose(1, 2))
        x = self.dropout1(nn.functional.silu(x))
        x = self.norm2(self.conv2(x.transpose(1, 2)).transpose(1, 2))
        return self.fc(self.dropout2(nn.functional.silu(x)))


FUSIONS: dict[str, type[MLPFusion] | type[CNNFusion]] = {"mlp": MLPFusion, "cnn": CNNFusion}


def make_fusion(name: str, channels: int, targets: int, *, dropout: float = 0.1) -> nn.Module:
    """A fusion module by name: "mlp" or "cnn"."""
    if name not in FUSIONS:
        raise SettingError(f"fusion={name!r}: expected one of {', '.join(sorted(FUSIONS))}")
    return FUSIONS[name](channels, targets, dropout=dropout)


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


class Weaver(nn.Module):
    """Surrogates and reconstruction, with the trainable parts a, b, F and, where there is one, the filter G.

    Args:
        fusion: F, maps `[batch, time, channel]` to `[batch, time, target]`.
        targets: positions of the channels to forecast; the others feed fusion and filter only.
        context_filter: G, likewise; None in the published method.
    """

    def __init__(self, fusion: nn.Module, targets: Sequence[int], context_filter: ContextFilter | None = None) -> None:
        super().__init__()
        self.fusion = fusion
        self.context_filter = context_filter
        self.a = nn.Parameter(torch.ones(len(targets)))
        self.b = nn.Parameter(torch.ones(len(targets)))
        self.register_buffer("targets", torch.as_tensor(list(targets), dtype=torch.long), persistent=False)

    targets: Tensor

    def surrogates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`[batch, time, channel]` to two of `[batch, time, target]`.

        F is evaluated once, so that both surrogates carry the same dropout mask and F cancels in training too.
        """
        return self._around(x, x.index_select(-1, self.targets))

    def context_surrogates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The same for a context, which is filtered first."""
        if self.context_filter is None:
            return self.surrogates(x)
        return self._around(x, x.index_select(-1, self.targets) + self.context_filter(x))

    def _around(self, x: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        fused = self.fusion(x.clamp(-FUSION_LIMIT, FUSION_LIMIT))
        return self.a * own + fused, fused - self.b * own

    def reconstruct(self, first: Tensor, second: Tensor) -> Tensor:
        """The forecast from those of both surrogates, `[batch, horizon, target]` each."""
        return (first - second) / (self.a + self.b)

    def reconstruct_quantiles(self, first: Tensor, second: Tensor) -> Tensor:
        """Quantiles of the forecast from those of both surrogates, `[batch, horizon, target, level]` each.

        The second surrogate carries -x, so its quantiles pair in reverse: tau of the first with 1 - tau of the second.
        The levels must be symmetric around one half. Sorted along the levels.
        """
        scale = (self.a + self.b).unsqueeze(-1)
        return ((first - second.flip(-1)) / scale).sort(dim=-1).values

    @torch.no_grad()
    def project(self) -> None:
        """Bring a and b back to positive values after an optimizer step (projected gradient)."""
        self.a.clamp_(min=SCALE_FLOOR)
        self.b.clamp_(min=SCALE_FLOOR)


def surrogate_bound(first: Tensor, second: Tensor, scale: Tensor, kind: Literal["squared", "absolute"]) -> Tensor:
    """Upper bound on the error of the reconstruction from the errors on both surrogates.

    Squared errors: (p - q)^2 <= 2 (p^2 + q^2), so 2 (l1 + l2) / (a + b)^2. Absolute ones: (l1 + l2) / (a + b).

    Args:
        first, second: errors on the surrogates, `[..., target]`.
        scale: a + b, `[target]`.
        kind: what the errors are.
    """
    if kind == "squared":
        return 2 * (first + second) / scale.square()
    return (first + second) / scale
