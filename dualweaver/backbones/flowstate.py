"""FlowState (IBM Granite), a state-space encoder with a decoder of basis functions, about 9 M parameters.

Source: Graf et al., "FlowState: Sampling Rate Invariant Time Series Forecasting", arXiv 2508.05287; the public
checkpoint `ibm-granite/granite-timeseries-flowstate-r1`. Written here anew, since the makers' package keeps to older
releases of torch. Every step is a token. A layer is a diagonal linear state space with complex states, convolved over
time by a Fourier transform; the hidden state of a step gives coefficients of polynomials, which are the forecast from
there on. A `scale` tells how fast the series moves compared with the daily cycle of hourly data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from dualweaver.backbones.decoder import working_dtype
from dualweaver.backbones.pretrained import PretrainedBackbone
from dualweaver.backbones.quantiles import QuantileBackbone, empirical_quantiles
from dualweaver.compute.recompute import recomputable
from dualweaver.errors import CheckpointError, SettingError

__all__ = ["FlowStateBackbone", "FlowStateConfig", "FlowStateForPrediction"]

LONGEST = 16 * 1024  # steps, whatever the scale
SMALLEST_VARIANCE = 1e-5
_CONTEXT = 512  # of up to 2048; every step costs as much as a patch does elsewhere
_ENDS = {"legs": (-1.0, 0.95), "hlegs": (0.0, 0.95)}  # of the polynomials' domain, which one patch fills


class FlowStateConfig(PretrainedConfig):
    """Sizes of a FlowState; the names are those of the public checkpoints, the defaults those of its makers."""

    model_type = "flowstate"

    def __init__(
        self,
        context_length: int = 2048,
        scale_factor: float = 1.0,
        embedding_feature_dim: int = 512,
        encoder_num_layers: int = 6,
        encoder_state_dim: int = 512,
        mlp_type: str = "gated",
        out_gating: bool = False,
        with_missing: bool = True,
        decoder_patch_len: int = 24,
        decoder_dim: int = 256,
        decoder_type: str = "legs",
        quantiles: Sequence[float] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
        prediction_type: str = "mean",
        **kwargs: Any,
    ) -> None:
        self.context_length = context_length
        self.scale_factor = scale_factor
        self.embedding_feature_dim = embedding_feature_dim
        self.encoder_num_layers = encoder_num_layers
        self.encoder_state_dim = encoder_state_dim
        self.mlp_type = mlp_type
        self.out_gating = out_gating
        self.with_missing = with_missing
        self.decoder_patch_len = decoder_patch_len
        self.decoder_dim = decoder_dim
        self.decoder_type = decoder_type
        self.quantiles = list(quantiles)
        self.prediction_type = prediction_type
        super().__init__(**kwargs)


class _StateSpace(nn.Module):
    """`[series, time, width]` to the same, of the last `wanted` steps.

    y_t = Re(C x_t) + D u_t with x_t = A x_(t-1) + B u_t, where A and B come from a continuous system by
    holding the input for one step, whose length is learnt for each state.
    """

    def __init__(self, config: FlowStateConfig) -> None:
        super().__init__()
        states, width = config.encoder_state_dim, config.embedding_feature_dim
        self.log_Lambda_real = nn.Parameter(torch.empty(states))
        self.Lambda_imag = nn.Parameter(torch.empty(states))
        self.log_Delta = nn.Parameter(torch.empty(states))
        self.B_tilde_r = nn.Parameter(torch.empty(states, width))
        self.B_tilde_i = nn.Parameter(torch.empty(states, width))
        self.C_tilde_r = nn.Parameter(torch.empty(width, states))
        self.C_tilde_i = nn.Parameter(torch.empty(width, states))
        self.D = nn.Parameter(torch.empty(width))
        if config.out_gating:
            self.output_gate = nn.Linear(width, width)

    def forward(self, u: Tensor, scale: float, wanted: int) -> Tensor:
        dtype = working_dtype(self.D.dtype)  # there are no complex numbers in bfloat16
        rate = torch.complex(-self.log_Lambda_real.to(dtype).exp(), self.Lambda_imag.to(dtype))
        exponent = scale * rate * self.log_Delta.to(dtype).exp()
        into = torch.complex(self.B_tilde_r.to(dtype), self.B_tilde_i.to(dtype))
        into = (exponent.exp() - 1)[:, None] / rate[:, None] * into
        out = torch.complex(self.C_tilde_r.to(dtype), self.C_tilde_i.to(dtype))
        fed = u.to(dtype)
        driven = torch.complex(fed @ into.real.T, fed @ into.imag.T)
        states = _decayed_sums(driven, exponent, wanted)
        y = (states.real @ out.real.T - states.imag @ out.imag.T).to(u.dtype)
        if hasattr(self, "output_gate"):
            y = torch.sigmoid(self.output_gate(y)) * y
        return y + self.D * u[:, -wanted:]


def _decayed_sums(driven: Tensor, exponent: Tensor, wanted: int) -> Tensor:
    """The last `wanted` of sum_k exp(exponent * (t - k)) * driven_k over k up to t, `[series, time, state]`."""
    length = driven.shape[1]
    ages = torch.arange(length, dtype=exponent.real.dtype, device=driven.device)
    decay = (ages[:, None] * exponent).exp()
    if wanted == 1:
        return (driven * decay.flip(0)).sum(dim=1, keepdim=True)
    both = torch.fft.fft(driven, n=2 * length, dim=1) * torch.fft.fft(decay, n=2 * length, dim=0)
    return torch.fft.ifft(both, dim=1)[:, length - wanted : length]


class _GatedFeed(nn.Module):
    """The wider of the two feed-forward networks: RMS norm, SwiGLU and a skip connection of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rms_weight = nn.Parameter(torch.ones(width))
        self.w1 = nn.Linear(width, 2 * width)
        self.w2 = nn.Linear(width, 2 * width)
        self.w3 = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normal = F.rms_norm(x, x.shape[-1:], self.rms_weight, 1e-6)
        return x + self.w3(F.silu(self.w1(normal)) * self.w2(normal))


class _Layer(nn.Module):
    def __init__(self, config: FlowStateConfig) -> None:
        super().__init__()
        width = config.embedding_feature_dim
        self.ssm = _StateSpace(config)
        if config.mlp_type == "transformer":
            self.mlp = _GatedFeed(width)
        else:
            self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    @recomputable
    def forward(self, x: Tensor, scale: float, wanted: int) -> Tensor:
        """`[series, time, width]` to `[series, wanted, width]`, of the last steps."""
        y = self.ssm(x, scale, wanted)
        if hasattr(self, "mlp"):
            y = self.mlp(y)
        else:
            y = F.selu(y)
            y = y * torch.sigmoid(self.out(y))
        return x[:, -wanted:] + self.norm(y)


class _Embedding(nn.Module):
    def __init__(self, config: FlowStateConfig) -> None:
        super().__init__()
        self.embed = nn.Linear(2, config.embedding_feature_dim)  # of the value and whether it is missing


class _Encoder(nn.Module):
    def __init__(self, config: FlowStateConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.encoder_num_layers))


class _Decoder(nn.Module):
    def __init__(self, config: FlowStateConfig) -> None:
        super().__init__()
        self.lin = nn.Linear(config.embedding_feature_dim, len(config.quantiles) * config.decoder_dim)
        self.degrees, self.patch = config.decoder_dim, config.decoder_patch_len
        self.start, self.end = _ENDS[config.decoder_type]

    def forward(self, x: Tensor, scale: float, steps: int) -> Tensor:
        """`[..., width]` to `[..., level, step]`."""
        coefficients = self.lin(x).unflatten(-1, (-1, self.degrees))
        dtype = working_dtype(x.dtype)
        ahead = torch.arange(1, steps + 1, dtype=dtype, device=x.device)
        basis = _legendre(self.start + ahead * (scale * (self.end - self.start) / self.patch), self.degrees)
        return coefficients.to(dtype) @ basis / 4


def _legendre(t: Tensor, degrees: int) -> Tensor:
    """The first Legendre polynomials by their recursion, `[degree, step]`."""
    rows = [torch.ones_like(t), t]
    for n in range(1, degrees - 1):
        rows.append(((2 * n + 1) * t * rows[n] - n * rows[n - 1]) / (n + 1))
    return torch.stack(rows[:degrees])


class _Body(nn.Module):
    def __init__(self, config: FlowStateConfig) -> None:
        super().__init__()
        self.embed = _Embedding(config)
        self.encoder = _Encoder(config)
        self.decoder = _Decoder(config)


class FlowStateForPrediction(PreTrainedModel):
    """The network, `[series, time]` to quantiles `[series, step, level]` in the units of its input."""

    config: FlowStateConfig
    config_class = FlowStateConfig
    base_model_prefix = "model"
    main_input_name = "context"

    def __init__(self, config: FlowStateConfig) -> None:
        super().__init__(config)
        for name, known in (
            ("with_missing", (True,)),
            ("decoder_type", tuple(_ENDS)),
            ("mlp_type", ("gated", "transformer")),
            ("prediction_type", ("mean", "median", "quantile")),
        ):
            if getattr(config, name) not in known:
                raise CheckpointError(f"this FlowState asks for {name}={getattr(config, name)!r}; known are {known}")
        if config.decoder_patch_len < 1 or config.context_length < 2 or not config.scale_factor > 0:
            raise CheckpointError("decoder_patch_len, context_length and scale_factor of a FlowState are positive")
        self.model = _Body(config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.reset_parameters()
        elif isinstance(module, _GatedFeed):
            nn.init.ones_(module.rms_weight)
        elif isinstance(module, _StateSpace):
            states, width = module.B_tilde_r.shape
            with torch.no_grad():
                module.log_Lambda_real.fill_(-0.7)
                module.Lambda_imag.copy_(torch.pi * torch.arange(states))
                module.log_Delta.uniform_(-6.9, -2.3)
                for weights, inputs in ((module.B_tilde_r, width), (module.B_tilde_i, width)):
                    weights.normal_(std=0.5 / inputs**0.5)
                for weights in (module.C_tilde_r, module.C_tilde_i):
                    weights.normal_(std=0.5 / states**0.5)
                module.D.normal_()

    def patch_of(self, scale: float) -> int:
        """Steps that one hidden state forecasts."""
        return max(1, int(self.config.decoder_patch_len / scale + 1e-6))

    def forward(self, context: Tensor, steps: int, scale: float) -> Tensor:
        """Quantiles of the next steps, `[series, time]` to `[series, steps, level]`.

        Beyond one patch, the missing steps are fed as such, and each patch is read off the step before it.
        """
        dtype = working_dtype(context.dtype)
        values, patch = context.to(dtype), self.patch_of(scale)
        unknown = max(0, steps - patch)
        mean, deviation = _running_statistics(values)
        known = F.pad((values - mean) / deviation, (0, unknown))
        missing = F.pad(torch.zeros_like(values), (0, unknown), value=1.0)
        x = self.model.embed.embed(torch.stack([known, missing], dim=-1).to(self.dtype))
        layers = self.model.encoder.layers
        for layer in layers[:-1]:
            x = layer(x, scale, x.shape[1])
        x = layers[-1](x, scale, unknown + 1)
        starts = [*range(0, unknown + 1, patch)]
        rest = unknown - starts[-1]  # steps of which only the last position knows
        blocks = self.model.decoder(x[:, [*starts, unknown] if rest else starts], scale, patch)
        forecast = torch.cat(list(blocks.unbind(dim=1)), dim=-1)
        if rest:
            forecast = torch.cat([forecast[..., :-patch], forecast[..., -rest:]], dim=-1)
        forecast = forecast[..., :steps].to(dtype) * deviation[:, -1:, None] + mean[:, -1:, None]
        return empirical_quantiles(forecast, self.config.quantiles).to(context.dtype)


def _running_statistics(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of all steps so far, `[series, time]` each; a step deviates from the mean of its own time."""
    count = torch.arange(1, values.shape[1] + 1, dtype=values.dtype, device=values.device)
    mean = values.cumsum(dim=1) / count
    variance = (values - mean).square().cumsum(dim=1) / count
    return mean, variance.clamp_min(SMALLEST_VARIANCE).sqrt()


class FlowStateBackbone(PretrainedBackbone, QuantileBackbone):
    """FlowState: nine quantiles, a patch of 24 steps or any number of them in one pass.

    The point forecast is the mean of the quantiles, weighted as its makers do, or the median where the checkpoint says
    so. Unlike in the makers' package, gradients pass through the running mean and deviation.

    Args:
        model: the wrapped model.
        context_length: past steps to feed, 512 where None, or all that the model takes, if that is fewer.
        scale_factor: 24 divided by the steps of the series' cycle (1 for hourly data with a daily cycle, 0.25 for
            quarters of an hour, 24 / 7 for daily data with a weekly one); the checkpoint's own where None.
        checkpoint, revision: where the weights came from.
    """

    name = "flowstate"
    default_checkpoint = "ibm-granite/granite-timeseries-flowstate-r1"
    summary = "FlowState, 9 M: state-space encoder, context up to 2048, patches of 24 in one pass, nine quantiles"
    licence = "Apache-2.0"

    model: FlowStateForPrediction
    max_context: int

    def __init__(
        self,
        model: FlowStateForPrediction,
        *,
        context_length: int | None = None,
        scale_factor: float | None = None,
        checkpoint: str | None = None,
        revision: str | None = None,
    ) -> None:
        config = model.config
        scale = config.scale_factor if scale_factor is None else scale_factor
        if not scale > 0:
            raise SettingError(f"scale_factor={scale_factor}: expected a positive number")
        limit = min(LONGEST, int(config.context_length / scale))
        super().__init__(
            context_length=min(_CONTEXT, limit) if context_length is None else context_length,
            native_horizon=model.patch_of(scale),
            min_context=2,
            max_context=limit,
            quantile_levels=config.quantiles,
            checkpoint=checkpoint,
            revision=revision,
        )
        self.model = model
        self.scale = float(scale)
        self.point: Literal["mean", "median"] = "median" if config.prediction_type == "median" else "mean"
        self.freeze()

    @classmethod
    def model_class(cls) -> type[FlowStateForPrediction]:
        return FlowStateForPrediction

    def native(self, context: Tensor, steps: int | None = None) -> Tensor:
        """`[series, time]` to `[series, steps, 9]`, one patch of steps where None."""
        return self.model(context, steps or self.native_horizon, self.scale)

    def _roll(self, context: Tensor, horizon: int) -> Tensor:
        """One pass, in which context and horizon share what the model takes; more where the horizon is half of that."""
        self.check_context(context.shape[1])
        most = self.native_horizon + self.max_context // 2
        blocks: list[Tensor] = []
        missing = horizon
        while missing > 0:
            steps = min(missing, most)
            room = self.max_context - max(0, steps - self.native_horizon)
            blocks.append(self.one_block(context[:, -room:], steps))
            missing -= steps
            if missing:
                context = torch.cat([context, self._point(blocks[-1])], dim=1)
        return torch.cat(blocks, dim=1)

    def _point(self, block: Tensor) -> Tensor:
        if self.point == "median":
            return super()._point(block)
        levels = torch.tensor(self.quantile_levels, dtype=block.dtype, device=block.device)
        weights = 0.5 - (0.5 - levels).abs()
        return block @ (weights / weights.sum())
