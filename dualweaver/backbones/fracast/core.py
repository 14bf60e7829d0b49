"""Fracast-0 written for training through it: every operation in the input's dtype, nothing computed that is not read.

Source of the model: the PyPI package `fracast` (Apache-2.0), whose weights this module takes as they are; the names of
the parameters are those of its checkpoint. A window of `[series, window]` goes through an encoder of ten dilated
causal convolutions at full resolution (`fracast_ladder`), and a head that turns the encoding's mean, last step and
tail into 48 steps of nine quantiles. Both know the series' significant periods, found by a periodogram.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualweaver.backbones.fracast.ladder import (
    RMSNorm,
    ScaleCondition,
    SelfSimilarBlock,
    Stage,
    SwiGLU,
    causal_conv,
    climb,
)
from dualweaver.errors import CheckpointError

__all__ = ["FracastConfig", "FracastModel", "significant_periods"]

_RECENCY_CHANNELS = 5

# variants of the architecture that the package's configuration could name and that the released model does not use
_FIXED = {
    "kernel_size": 3,
    "causal": True,
    "separable_conv": True,
    "share_stages": True,
    "scale_cond": "film",
    "recency_encoding": True,
    "periodic_phase": True,
    "periodic_harmonics": 1,
    "head_kind": "gather",
    "head_output_mode": "direct",
    "head_fc_kernel": 3,
    "head_future_conv": True,
    "head_seasonal_fill_mode": "phase_mean",
}


@dataclass(frozen=True)
class FracastConfig:
    """Sizes of the model, named as in the package's `config.json`; the defaults are those of Fracast-0.

    Attributes:
        d_model: width of the features.
        W: longest window.
        quantiles: levels of the forecast.
        horizon: steps of the forecast.
        ffn_mult: width of the SwiGLU in the ladders, relative to `d_model`.
        n_stages, dilation_base: stages of the encoder and the factor from one dilation to the next.
        scale_cond_dim: sinusoids that describe a dilation.
        periodic_topk, periodic_alpha, periodic_min_period: most periods kept, significance level, shortest period.
        head_d_ff, head_layers: width and number of the head's SwiGLUs.
        head_fc_layers: convolutions along the horizon.
        head_future_conv_layers, head_future_conv_seed: stages of the future ladder, encoded steps it starts from.
        head_phase_bins: phases of the seasonal profile.
    """

    d_model: int = 64
    W: int = 2048
    quantiles: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    horizon: int = 48
    ffn_mult: float = 1.5
    n_stages: int = 10
    dilation_base: int = 2
    scale_cond_dim: int = 8
    periodic_topk: int = 4
    periodic_alpha: float = 0.05
    periodic_min_period: int = 2
    head_d_ff: int = 96
    head_layers: int = 1
    head_fc_layers: int = 2
    head_future_conv_layers: int = 6
    head_future_conv_seed: int = 128
    head_phase_bins: int = 16

    @classmethod
    def from_file(cls, file: Path) -> FracastConfig:
        """Read the package's `config.json`.

        Raises:
            CheckpointError: not such a file, or a variant that is not supported.
        """
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            model, ratios = dict(found["model"]), found["pyramid"]["ratios"]
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{file} is not a Fracast configuration ({error!r})") from error
        if ratios:
            raise CheckpointError(f"{file}: pyramid.ratios={ratios} is not supported; expected none")
        for name, value in _FIXED.items():
            if model.get(name, value) != value:
                raise CheckpointError(f"{file}: {name}={model[name]!r} is not supported; expected {value!r}")
        known = {field.name: model[field.name] for field in fields(cls) if field.name in model}
        return cls(**{**known, "quantiles": tuple(known.get("quantiles", cls.quantiles))})


class FracastModel(nn.Module):
    """Scaled windows to scaled quantiles."""

    def __init__(self, config: FracastConfig) -> None:
        super().__init__()
        self.config = config
        self.core = _Encoder(config)
        self.head = _Head(config)

    def forward(self, values: Tensor, window: int) -> Tensor:
        """`[series, time]`, scaled, to `[series, horizon, level]`.

        Args:
            values: the last `time <= window` steps.
            window: steps of the window; those before the first value count as unobserved.
        """
        periods = significant_periods(values.detach(), window, self.config)
        mean, tail = self.core(values, periods, window)
        return self.head(mean, tail, values, periods, window)


class _Encoder(nn.Module):
    """Value, coverage, recency and phases, projected and filtered at every scale."""

    def __init__(self, config: FracastConfig) -> None:
        super().__init__()
        width = config.d_model
        self.tail = config.head_future_conv_seed
        self.dilations = [config.dilation_base**i for i in range(config.n_stages)]
        self.in_proj = nn.Linear(2 + _RECENCY_CHANNELS, width)
        self.periodic = nn.ModuleDict({"proj": nn.Linear(2 * config.periodic_topk, width)})
        self.scale = ScaleCondition(width, max(1, config.scale_cond_dim // 2))
        self.block = SelfSimilarBlock(width, int(width * config.ffn_mult))
        self.norm = RMSNorm(width)

    def forward(self, values: Tensor, periods: Tensor, window: int) -> tuple[Tensor, Tensor]:
        """Mean `[series, width]` and tail `[series, tail, width]` of the encoded window."""
        missing = window - values.shape[1]
        position = torch.arange(window, device=values.device)
        observed = (position >= missing).to(values.dtype)[:, None]
        known = torch.cat([observed, _recency(position, window).to(values.dtype)], dim=1)
        phases = _phases(position, periods).to(values.dtype)
        x = F.linear(known, self.in_proj.weight[:, 1:], self.in_proj.bias) + self.periodic["proj"](phases)
        x = x + F.pad(values, (missing, 0))[..., None] * self.in_proj.weight[:, 0]
        scale, shift = self.scale(self.dilations)
        stages = [Stage(d, 0, scale[i], shift[i]) for i, d in enumerate(self.dilations)]
        mean, tail = climb(x, self.block, stages, tail=self.tail, norm=True)
        return mean * self.norm.weight, tail * self.norm.weight


class _HorizonConv(nn.Module):
    """Causal convolution along the horizon with a residual."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.dilation = dilation
        self.dw_weight = nn.Parameter(torch.empty(width, 1, 3))
        self.dw_bias = nn.Parameter(torch.zeros(width))
        nn.init.kaiming_uniform_(self.dw_weight, a=5**0.5)
        self.norm = RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + causal_conv(x, self.dw_weight, self.dw_bias, self.dilation))


class _FutureConv(nn.Module):
    """Runs a ladder on from the encoding's tail into the horizon, fed with the seasonal profile."""

    def __init__(self, config: FracastConfig) -> None:
        super().__init__()
        width = config.d_model
        self.dilations = [config.dilation_base**i for i in range(config.head_future_conv_layers)]
        self.in_proj = nn.Linear(1 + _RECENCY_CHANNELS, width)
        self.block = SelfSimilarBlock(width, int(width * config.ffn_mult))
        self.out_proj = nn.Linear(width, width)

    def forward(self, tail: Tensor, fill: Tensor, recency: Tensor) -> Tensor:
        """`[series, tail, width]` and `[series, horizon]` to `[series, horizon, width]`."""
        future = fill[..., None] * self.in_proj.weight[:, 0]
        future = future + F.linear(recency, self.in_proj.weight[:, 1:], self.in_proj.bias)
        horizon = fill.shape[1]
        x = torch.cat([tail, future], dim=1)
        wanted = [horizon]  # last steps that each stage has to give, from the top down: two dilations more below
        for dilation in reversed(self.dilations[1:]):
            wanted.append(wanted[-1] + 2 * dilation)
        plan, length = [], x.shape[1]
        for dilation, steps in zip(self.dilations, reversed(wanted), strict=True):
            plan.append(Stage(dilation, start=max(0, length - steps)))
            length -= plan[-1].start
        return self.out_proj(climb(x, self.block, plan, tail=horizon, norm=False)[1])


class _Head(nn.Module):
    """Summary of the encoding and a query a step, decoded into quantiles."""

    def __init__(self, config: FracastConfig) -> None:
        super().__init__()
        width = config.d_model
        self.horizon = config.horizon
        self.bins = config.head_phase_bins
        self.summary_proj = nn.Linear(2 * width + _RECENCY_CHANNELS, width)
        self.queries = nn.Parameter(torch.randn(config.horizon, width) * width**-0.5)
        self.decoder_ffns = nn.ModuleList(SwiGLU(width, config.head_d_ff) for _ in range(config.head_layers))
        self.decoder_norms = nn.ModuleList(RMSNorm(width) for _ in range(config.head_layers))
        self.fc_blocks = nn.ModuleList(_HorizonConv(width, 2**i) for i in range(config.head_fc_layers))
        self.future_conv = _FutureConv(config)
        self.out_proj = nn.Linear(width, len(config.quantiles))

    def forward(self, mean: Tensor, tail: Tensor, values: Tensor, periods: Tensor, window: int) -> Tensor:
        """`[series, horizon, level]`."""
        future = torch.arange(window, window + self.horizon, device=values.device)
        recency = _recency(future, window).to(values.dtype)
        of_step, of_series = self.summary_proj.weight.split([_RECENCY_CHANNELS, 2 * mean.shape[1]], dim=1)
        step = F.linear(recency, of_step, self.summary_proj.bias) + self.queries
        x = step + F.linear(torch.cat([mean, tail[:, -1]], dim=1), of_series)[:, None]
        for ffn, norm in zip(self.decoder_ffns, self.decoder_norms, strict=True):
            x = norm(x + ffn(x))
        for block in self.fc_blocks:
            x = block(x)
        fill = _seasonal_profile(values, future, periods[:, :1], window, self.bins)
        return self.out_proj(x + self.future_conv(tail, fill, recency))


@torch.no_grad()
def significant_periods(values: Tensor, window: int, config: FracastConfig) -> Tensor:
    """The strongest periods of each series, in steps, 0 where no more are significant: `[series, topk]`, integers.

    Local maxima of the periodogram whose share of the power passes a threshold that is corrected for the number of
    frequencies (log(bins / alpha) / bins). In float32 whatever the dtype: the answer is discrete, and the model has
    learned with it.
    """
    values = values.float()
    centred = values - values.mean(dim=1, keepdim=True)
    size = 1 << math.ceil(math.log2(max(2, window)))
    # unobserved steps are zeros; where they stand in the window does not matter to the power
    power = torch.fft.rfft(centred, n=size).abs().square()[:, 1:]
    share = power / power.sum(dim=1, keepdim=True).clamp_min(1e-12)
    bins = share.shape[1]
    peak = F.pad((share[:, 1:-1] > share[:, :-2]) & (share[:, 1:-1] > share[:, 2:]), (1, 1))
    lowest = max(0, size // max(2, window // 2) - 1)
    highest = min(bins - 1, size // max(2, config.periodic_min_period) - 1)
    peak[:, :lowest] = False
    peak[:, highest + 1 :] = False
    threshold = math.log(bins / config.periodic_alpha) / bins
    score = share.where(peak & (share >= threshold), -1.0)
    best = score.topk(config.periodic_topk, dim=1)
    periods = torch.round(size / (best.indices + 1).float()).long()
    return periods.where(best.values > 0, 0)


def _phases(position: Tensor, periods: Tensor) -> Tensor:
    """Sine and cosine of the phase under each period, zero where there is none: `[series, time, 2 * topk]`, float32."""
    angle = 2.0 * math.pi * position[None, :, None].float() / periods[:, None].clamp_min(1).float()
    waves = torch.stack([angle.sin(), angle.cos()], dim=-1) * (periods > 0)[:, None, :, None]
    return waves.flatten(2)


def _recency(position: Tensor, window: int) -> Tensor:
    """Bounded functions of the distance to the window's last step: `[time, 5]`, float32."""
    delta = (position.float() - (window - 1)) / window
    distance = delta.abs()
    log = delta.sign() * torch.log1p(distance) / math.log(2.0)
    return torch.stack([delta, log, *(torch.exp(-rate * distance) for rate in (0.5, 2.0, 8.0))], dim=-1)


def _seasonal_profile(values: Tensor, future: Tensor, period: Tensor, window: int, bins: int) -> Tensor:
    """Mean of the observed values of the same phase, for future positions: `[series, horizon]`.

    Phases that were not observed take the series' mean. Sums over phases are products with indicator matrices: gathers
    would make the gradient on accelerators depend on the order of additions.
    """
    period = period.clamp_min(1).float()

    def indicator(position: Tensor) -> Tensor:  # [series, time, bin]
        phase = (position.float() % period) / period * bins
        return F.one_hot(phase.long().clamp_max(bins - 1), bins).to(values.dtype)

    past = indicator(torch.arange(window - values.shape[1], window, device=values.device))
    count = past.sum(dim=1)
    total = torch.einsum("ntb,nt->nb", past, values)
    profile = torch.where(count > 0, total / count.clamp_min(1), values.mean(dim=1, keepdim=True))
    return torch.einsum("nhb,nb->nh", indicator(future), profile)
