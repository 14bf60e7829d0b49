"""The dilation ladder of Fracast: one convolutional block, shared by all scales, applied at dilations 1, 2, 4, ..."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualweaver.backbones.fracast.frozen import FrozenLadder

__all__ = ["EPS", "RMSNorm", "ScaleCondition", "SelfSimilarBlock", "Stage", "SwiGLU", "causal_conv", "climb"]

# what float32 gives nn.RMSNorm by default; fixed, so that float64 computes the same function
EPS = torch.finfo(torch.float32).eps


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` whose epsilon does not depend on the dtype."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=EPS)


class SwiGLU(nn.Module):
    """`down(silu(gate) * value)` with `gate, value = up(x)`."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


class SelfSimilarBlock(nn.Module):
    """Weights of the block: depthwise dilated convolution, point-wise projection, SwiGLU, two RMS norms."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.dw_weight = nn.Parameter(torch.empty(width, 1, 3))
        self.dw_bias = nn.Parameter(torch.zeros(width))
        nn.init.kaiming_uniform_(self.dw_weight, a=5**0.5)
        self.pw = nn.Linear(width, width)
        self.ffn = SwiGLU(width, hidden)
        self.norm1 = RMSNorm(width)
        self.norm2 = RMSNorm(width)

    def forward(self, x: Tensor, dilation: int, start: int = 0) -> Tensor:
        """`[series, time, width]` to `[series, time - start, width]`: the output from position `start` on."""
        x = self.norm1(x[:, start:] + self.pw(causal_conv(x, self.dw_weight, self.dw_bias, dilation, start)))
        return self.norm2(x + self.ffn(x))


class ScaleCondition(nn.Module):
    """Scale and shift of the features before a stage, from sinusoids of log2(dilation)."""

    def __init__(self, width: int, frequencies: int) -> None:
        super().__init__()
        self.to_gb = nn.Linear(2 * frequencies, 2 * width)

    def forward(self, dilations: list[int]) -> tuple[Tensor, Tensor]:
        """Scale and shift, `[stage, width]` each."""
        weight = self.to_gb.weight
        octave = torch.tensor(dilations, dtype=torch.float32, device=weight.device).log2()
        halvings = 0.5 ** torch.arange(weight.shape[1] // 2, dtype=torch.float32, device=weight.device)
        angle = torch.pi * octave[:, None] * halvings
        gamma, beta = self.to_gb(torch.cat([angle.sin(), angle.cos()], dim=1).to(weight.dtype)).chunk(2, dim=1)
        return 1 + gamma, beta


@dataclass(frozen=True)
class Stage:
    """One step of the ladder; its output begins at position `start` of its input. Scale and shift are `[width]`."""

    dilation: int
    start: int = 0
    scale: Tensor | None = None
    shift: Tensor | None = None


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor, dilation: int, start: int = 0) -> Tensor:
    """Depthwise causal convolution along time, zeros before the first step: `[series, time, width]`.

    Three shifted products, because the channels are the last axis here and `conv1d` would transpose there and back.
    """
    taps = weight.shape[-1]
    reach = (taps - 1) * dilation
    length = x.shape[1] - start
    x = F.pad(x, (0, 0, reach - start, 0))  # a negative padding cuts
    columns = weight[:, 0].t().contiguous()  # strided ones would not be vectorised
    shifted = [x[:, k * dilation : k * dilation + length] * columns[k] for k in range(taps)]
    return sum(shifted[1:], start=shifted[0]) + bias


def climb(x: Tensor, block: SelfSimilarBlock, stages: list[Stage], *, tail: int, norm: bool) -> tuple[Tensor, Tensor]:
    """Apply the stages one after the other.

    Args:
        x: `[series, time, width]`.
        block: the shared weights.
        stages: dilation and conditioning of each application.
        tail: last positions to return.
        norm: whether a further RMS norm (without weight) follows the last stage.

    Returns:
        The mean over time `[series, width]` and the last `tail` positions `[series, tail, width]` of the output.
    """
    trained = (*block.parameters(), *(t for stage in stages for t in (stage.scale, stage.shift) if t is not None))
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in trained):
        with torch.autocast(x.device.type, enabled=False):
            mean, last = _fold(block, stages, tail, norm)(x.to(block.dw_bias.dtype))
            scale = x.shape[-1] ** 0.5 if norm else 1.0
            return mean * scale, last * scale
    for stage in stages:
        if stage.scale is not None and stage.shift is not None:
            x = torch.addcmul(stage.shift, x, stage.scale)
        x = block(x, stage.dilation, stage.start)
    if norm:
        x = F.rms_norm(x, x.shape[-1:], eps=EPS)
    return x.mean(dim=1), x[:, -tail:]


@torch.no_grad()
def _fold(block: SelfSimilarBlock, stages: list[Stage], tail: int, norm: bool) -> FrozenLadder:
    """A few dozen tiny products; cheap enough to be done at every call rather than kept and found stale."""
    ffn, width = block.ffn, block.dw_bias.shape[0]
    root = width**0.5  # a norm over the mean square is one over the sum of squares, times this
    first, second = block.norm1.weight * root, block.norm2.weight * root
    before = [torch.ones_like(second)] + [second] * (len(stages) - 1)  # weight of the norm in front of the stage
    return FrozenLadder(
        taps=block.dw_weight[:, 0].t().contiguous().unbind(),  # strided ones would not be vectorised
        pw=block.pw.weight.t(),
        pw_bias=block.pw(block.dw_bias),
        norm1=first,
        up=(ffn.up.weight * first).t(),
        up_bias=ffn.up.bias,
        down=ffn.down.weight.t(),
        down_bias=ffn.down.bias,
        scale=[w if stage.scale is None else w * stage.scale for w, stage in zip(before, stages, strict=True)],
        shift=[torch.zeros_like(second) if stage.shift is None else stage.shift for stage in stages],
        norm2=second,
        dilations=[stage.dilation for stage in stages],
        starts=[stage.start for stage in stages],
        norm=norm,
        tail=tail,
        floor=first.new_tensor(width * EPS),
    )
