"""F, which mixes the channels of a window: point-wise in time, or over five steps (arXiv 2602.22066, section 3)."""

from __future__ import annotations

import math

from torch import Tensor, nn

from dualweaver.errors import SettingError

__all__ = ["FUSIONS", "FUSION_LIMIT", "CNNFusion", "MLPFusion", "fusion_width", "make_fusion"]

FUSION_LIMIT = 1e3  # standard deviations: beyond, what F adds to other channels would drown them in float32


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
