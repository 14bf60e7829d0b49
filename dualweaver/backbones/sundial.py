"""Sundial, the generative forecaster (arXiv 2502.00816), as published in `thuml/sundial-base-128m`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from dualweaver.backbones.base import Forecast
from dualweaver.backbones.decoder import DecoderConfig, PatchDecoder, working_dtype
from dualweaver.backbones.flow import FlowMatching
from dualweaver.backbones.patchwise import PatchBackbone, label_windows
from dualweaver.backbones.quantiles import empirical_quantiles
from dualweaver.compute.products import Linear
from dualweaver.errors import SettingError

__all__ = ["SundialBackbone", "SundialConfig", "SundialForPrediction"]

LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
DEFAULT_LOSS_HORIZON = 96  # steps of the output that the published code trains on unless told otherwise
DEFAULT_SEED = 2024  # of the noise where the caller gives none; any fixed number makes the forecast a function


class SundialConfig(DecoderConfig):
    """Configuration of Sundial; the defaults are those of the 128 M checkpoint."""

    model_type = "sundial"

    def __init__(
        self,
        input_token_len: int = 16,
        output_token_lens: Sequence[int] = (720,),
        hidden_size: int = 768,
        intermediate_size: int = 3072,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 12,
        dropout_rate: float = 0.1,
        flow_loss_depth: int = 3,
        num_sampling_steps: int = 50,
        diffusion_batch_mul: int = 4,
        **kwargs: Any,
    ) -> None:
        self.dropout_rate = dropout_rate
        self.flow_loss_depth = flow_loss_depth
        self.num_sampling_steps = num_sampling_steps
        self.diffusion_batch_mul = diffusion_batch_mul
        super().__init__(
            input_token_len=input_token_len,
            output_token_lens=output_token_lens,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_hidden_layers=num_hidden_layers,
            num_attention_heads=num_attention_heads,
            **kwargs,
        )


class SundialPatchEmbedding(nn.Module):
    """A residual network on the patch and its mask: `[batch, token, 2 * patch]` to `[batch, token, hidden]`."""

    def __init__(self, config: SundialConfig) -> None:
        super().__init__()
        width = 2 * config.input_token_len
        self.hidden_layer = Linear(width, config.intermediate_size)
        self.output_layer = Linear(config.intermediate_size, config.hidden_size)
        self.residual_layer = Linear(width, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, patches: Tensor) -> Tensor:
        patches = patches.to(self.hidden_layer.weight.dtype)
        inner = F.silu(self.hidden_layer(patches))
        return self.dropout(self.output_layer(inner)) + self.residual_layer(patches)


class SundialForPrediction(PreTrainedModel):
    """Pre-norm decoder with a flow-matching head."""

    config: SundialConfig
    config_class = SundialConfig
    base_model_prefix = "model"

    def __init__(self, config: SundialConfig) -> None:
        super().__init__(config)
        embedding = SundialPatchEmbedding(config)
        self.model = PatchDecoder(config, embedding, norm_first=True, dropout=config.dropout_rate)
        self.patch: int = config.input_token_len
        self.output_length: int = config.output_token_lens[-1]
        self.copies: int = config.diffusion_batch_mul
        self.sampling_steps: int = config.num_sampling_steps
        self.flow_loss = FlowMatching(self.output_length, config.hidden_size, config.flow_loss_depth)
        self.post_init()

    def hidden_states(self, context: Tensor) -> list[Tensor]:
        """Embedding and output of every layer, each `[batch, token, hidden]`."""
        return list(self.model.states(self._patches(context)))

    def sample(
        self,
        context: Tensor,
        horizon: int,
        num_samples: int,
        *,
        generator: torch.Generator | None = None,
        noise: Sequence[Tensor] | None = None,
        revin: bool = True,
    ) -> Tensor:
        """Forecasts drawn from the model: `[batch, time]` to `[batch, num_samples, horizon]`.

        Beyond one output, the median over the samples at each step is appended to the context.

        Args:
            context: padded on the left with masked zeros to whole patches.
            horizon: steps ahead.
            num_samples: forecasts per series.
            generator: of the noise; one with a fixed seed where None. All series share the noise (common random
                numbers): a series' samples then depend on nothing else in the batch, and differences between series,
                such as those of two surrogates, carry none of its variance.
            noise: instead of drawn noise, one tensor `[num_samples * batch, output]` a block of the forecast, the
                samples outermost.
            revin: normalise the context by its mean and standard deviation and map the samples back.
        """
        values = context.to(working_dtype(context.dtype))
        if revin:
            mean = values.mean(dim=1, keepdim=True)
            scale = values.std(dim=1, keepdim=True, correction=0) + 1e-5
            values = (values - mean) / scale
        if noise is None:
            draws = self._shared_noise(num_samples, generator, like=values)
        else:
            draws = (_series_major(block, len(values), num_samples).to(values) for block in noise)
        caches = None
        if horizon > self.output_length:
            caches = self.model.new_caches(-(-values.shape[1] // self.patch) + horizon // self.patch)
        blocks: list[Tensor] = []
        missing, piece = horizon, values
        while missing > 0:
            start = next(draws, None)
            if start is None:
                raise SettingError(f"noise for {len(blocks)} blocks of the forecast; {horizon} steps need more")
            states = self.model(self._patches(piece), caches)[:, -1]
            block = self.flow_loss.sample(states, start, self.sampling_steps)
            blocks.append(block[..., :missing])
            missing -= block.shape[-1]
            piece = block.median(dim=1).values  # the lower one of the two in the middle
        samples = torch.cat(blocks, dim=-1)
        if revin:
            samples = samples * scale[:, None] + mean[:, None]
        return samples.to(context.dtype)

    def token_loss(
        self,
        context: Tensor,
        labels: Tensor,
        *,
        pred_len: int = DEFAULT_LOSS_HORIZON,
        generator: torch.Generator | None = None,
        noise: Tensor | None = None,
        times: Tensor | None = None,
        revin: bool = False,
    ) -> Tensor:
        """Flow-matching loss at every position: `[batch, token]`.

        Args:
            context: `[batch, time]`, whole patches.
            labels: `[batch, label]`, from the end of the first patch on.
            pred_len: steps of the output that count.
            generator: of noise and times, in this order, shared by all series (common random numbers): losses under
                equal seeds can be compared whatever is in the batch. Where None, every series has draws of its own
                from the global generator, as in the model's training.
            noise: instead of a draw, any shape that flattens to that of `[copy, batch, token, output]`.
            times: instead of a draw, likewise for `[copy, batch, token]`.
            revin: normalise both series by the context's statistics first.
        """
        if context.shape[1] % self.patch:
            raise SettingError(f"a context of {context.shape[1]} steps is no whole number of patches of {self.patch}")
        values, targets = (series.to(working_dtype(series.dtype)) for series in (context, labels))
        if revin:
            mean = values.mean(dim=1, keepdim=True)
            deviation = values.std(dim=1, keepdim=True, correction=0)
            scale = torch.where(deviation > 1e-2, deviation, torch.ones_like(deviation))
            values, targets = (values - mean) / scale, (targets - mean) / scale
        states = self.model(self._patches(values))
        windows = label_windows(targets, states.shape[1], self.output_length, self.patch)
        drawn = (self.copies, len(windows) if generator is None else 1, *windows.shape[1:])
        if noise is None:
            noise = _draw(torch.randn, drawn, generator, like=values)
        else:
            noise = noise.reshape(self.copies, *windows.shape).to(values)
        if times is None:
            times = _draw(torch.rand, drawn[:-1], generator, like=values)
        else:
            times = times.reshape(self.copies, *windows.shape[:-1]).to(values)
        return self.flow_loss.loss(states, windows, noise, times, pred_len)

    def _patches(self, values: Tensor) -> Tensor:
        """Values and mask of each patch: `[batch, time]` to `[batch, token, 2 * patch]`."""
        padding = (-values.shape[1] % self.patch, 0)
        both = (F.pad(part, padding).unfold(1, self.patch, self.patch) for part in (values, torch.ones_like(values)))
        return torch.cat(list(both), dim=-1)

    def _shared_noise(self, num_samples: int, generator: torch.Generator | None, like: Tensor) -> Iterator[Tensor]:
        # on the CPU, so that the default forecast does not depend on the device
        generator = generator if generator is not None else torch.Generator().manual_seed(DEFAULT_SEED)
        while True:
            yield _draw(torch.randn, (1, num_samples, self.output_length), generator, like)


def _draw(kind: Any, shape: tuple[int, ...], generator: torch.Generator | None, like: Tensor) -> Tensor:
    # always in float32: the same seed means the same noise in every precision
    device = generator.device if generator is not None else like.device
    return kind(shape, generator=generator, dtype=torch.float32, device=device).to(like)


def _series_major(noise: Tensor, batch: int, num_samples: int) -> Tensor:
    """`[num_samples * batch, output]`, samples outermost, to `[batch, num_samples, output]`."""
    return noise.reshape(num_samples, batch, -1).transpose(0, 1)


class SundialBackbone(PatchBackbone):
    """Sundial.

    The forecast is the mean over `num_samples` draws. Noise comes from a fixed seed unless a generator is given and
    is shared by all series, so the frozen model is a deterministic function, differentiable in its context.

    Args:
        model: the wrapped model.
        context_length: past steps to feed.
        num_samples: draws per series.
        checkpoint, revision: where the weights came from.
    """

    name = "sundial"
    default_checkpoint = "thuml/sundial-base-128m"
    summary = "Sundial 128M: generative transformer, sampled forecasts, patches of 16, blocks of 720"
    licence = "Apache-2.0"

    model: SundialForPrediction

    @classmethod
    def model_class(cls) -> type[SundialForPrediction]:
        return SundialForPrediction

    def __init__(
        self,
        model: SundialForPrediction,
        *,
        context_length: int | None = None,
        num_samples: int = 20,
        checkpoint: str | None = None,
        revision: str | None = None,
    ) -> None:
        if num_samples < 1:
            raise SettingError(f"num_samples={num_samples}: expected 1 or more")
        super().__init__(
            model,
            model.config,
            context_length=context_length,
            checkpoint=checkpoint,
            revision=revision,
            quantile_levels=LEVELS,
        )
        self.num_samples = num_samples
        self.freeze()

    def sample(
        self,
        context: Tensor,
        horizon: int | None = None,
        num_samples: int | None = None,
        *,
        generator: torch.Generator | None = None,
        noise: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Draws of the forecast, `[series, num_samples, horizon]`; see `SundialForPrediction.sample`."""
        self.check_context(context.shape[1])
        context = self.guarded(context)
        return self.model.sample(
            context, horizon or self.native_horizon, num_samples or self.num_samples, generator=generator, noise=noise
        )

    def native(self, context: Tensor) -> Tensor:
        return empirical_quantiles(self.sample(context), LEVELS)

    def forward(self, context: Tensor, horizon: int | None = None) -> Tensor:
        """Mean over the samples, `[series, horizon]`; the same noise at every call."""
        return self.sample(context, horizon).mean(dim=1)

    def distribution(
        self, context: Tensor, horizon: int | None = None, *, generator: torch.Generator | None = None
    ) -> Forecast:
        """Mean and quantiles of the samples; with a generator, new noise at every call."""
        samples = self.sample(context, horizon, generator=generator)
        return Forecast(samples.mean(dim=1), empirical_quantiles(samples, LEVELS), LEVELS)

    def loss(
        self,
        context: Tensor,
        labels: Tensor,
        *,
        horizon: int | None = None,
        generator: torch.Generator | None = None,
        noise: Tensor | None = None,
        times: Tensor | None = None,
    ) -> Tensor:
        """Flow-matching loss of the next `horizon` steps (96 where None) at every patch: `[series, token]`.

        `noise` and `times` may be handed in; their layout is that of `SundialForPrediction.token_loss`.
        """
        context, labels = self._whole_patches(self.guarded(context), labels)
        pred_len = horizon or DEFAULT_LOSS_HORIZON
        return self.model.token_loss(context, labels, pred_len=pred_len, generator=generator, noise=noise, times=times)
