"""Timer-XL, the decoder-only point forecaster (arXiv 2410.04803), as published in `thuml/timer-base-84m`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dualweaver.backbones.base import Forecast
from dualweaver.backbones.decoder import DecoderConfig, LayerCache, PatchDecoder, working_dtype
from dualweaver.backbones.patchwise import PatchBackbone, label_windows
from dualweaver.compute.products import Linear
from dualweaver.errors import SettingError

__all__ = ["TimerBackbone", "TimerConfig", "TimerForPrediction"]

SMALLEST_SCALE = 1e-2  # below it a piece counts as constant and is only centred


class TimerConfig(DecoderConfig):
    """Configuration of Timer; the defaults are those of the 84 M checkpoint."""

    model_type = "timer"

    def __init__(self, attention_dropout: float = 0.0, **kwargs: Any) -> None:
        self.attention_dropout = attention_dropout
        super().__init__(**kwargs)


class TimerPatchEmbedding(nn.Module):
    """One linear map of the raw patch: `[batch, token, patch]` to `[batch, token, hidden]`."""

    def __init__(self, config: TimerConfig) -> None:
        super().__init__()
        self.emb = Linear(config.input_token_len, config.hidden_size, bias=False)

    def forward(self, patches: Tensor) -> Tensor:
        return self.emb(patches.to(self.emb.weight.dtype))


class TimerForPrediction(PreTrainedModel):
    """Post-norm decoder with one linear head an output length."""

    config: TimerConfig
    config_class = TimerConfig
    base_model_prefix = "model"

    def __init__(self, config: TimerConfig) -> None:
        super().__init__(config)
        embedding = TimerPatchEmbedding(config)
        self.model = PatchDecoder(config, embedding, norm_first=False, dropout=config.attention_dropout)
        self.lm_heads = nn.ModuleList(
            Linear(config.hidden_size, length, bias=False) for length in config.output_token_lens
        )
        self.patch: int = config.input_token_len
        self.output_lengths: list[int] = list(config.output_token_lens)
        self.post_init()

    def hidden_states(self, context: Tensor) -> list[Tensor]:
        """Embedding and output of every layer, each `[batch, token, hidden]`."""
        return list(self.model.states(self._patches(context)))

    def forward(
        self,
        context: Tensor,
        *,
        revin: bool = False,
        max_output_length: int | None = None,
        caches: Sequence[LayerCache] | None = None,
    ) -> Tensor:
        """The steps after the last whole patch: `[batch, time]` to `[batch, output]`.

        Args:
            context: patches are taken from its start; an incomplete last one is dropped.
            revin: normalise by the mean and standard deviation of `context` and map the output back.
            max_output_length: the most steps of use; decides the head, see `head_for`.
            caches: keys and values of the patches before `context`, extended by those of `context`.
        """
        values = context.to(working_dtype(context.dtype))
        if revin:
            mean, scale = _statistics(values)
            values = (values - mean) / scale
        last = self.model(self._patches(values), caches)[:, -1]
        output = self.lm_heads[self.head_for(max_output_length)](last).to(values.dtype)
        if revin:
            output = output * scale + mean
        return output[:, :max_output_length].to(context.dtype)

    def head_for(self, limit: int | None) -> int:
        """Index of the head: the last in order, up to the first one longer than `limit`; the first one otherwise."""
        chosen = 0
        for index, length in enumerate(self.output_lengths[1:], start=1):
            if limit is None or length > limit:
                break
            chosen = index
        return chosen

    def rollout(self, context: Tensor, horizon: int, *, revin: bool = True, use_cache: bool = True) -> Tensor:
        """Forecast block by block: `[batch, time]` to `[batch, horizon]`.

        With the cache each block goes through the model alone and is normalised by its own statistics, while the keys
        and values before it keep the normalisation of their own time. Without it all steps so far are normalised
        together and run again.
        """
        dtype = context.dtype
        piece = context[:, context.shape[1] % self.patch :].to(working_dtype(dtype))
        longest_block = self.output_lengths[self.head_for(horizon)]
        caches = None
        if use_cache and horizon > longest_block:
            caches = self.model.new_caches((piece.shape[1] + horizon) // self.patch)
        blocks: list[Tensor] = []
        missing = horizon
        while missing > 0:
            block = self(piece, revin=revin, max_output_length=missing, caches=caches)
            blocks.append(block)
            missing -= block.shape[1]
            piece = block if use_cache else torch.cat([piece, block], dim=1)
        return torch.cat(blocks, dim=1).to(dtype)

    def token_predictions(self, context: Tensor, head: int = 0) -> Tensor:
        """What follows each patch: `[batch, time]` to `[batch, token, output]`."""
        return self.lm_heads[head](self.model(self._patches(context)))

    def token_loss(self, context: Tensor, labels: Tensor, *, revin: bool = False) -> Tensor:
        """Squared error at every position, averaged over the output and over the heads: `[batch, token]`.

        Args:
            context: `[batch, time]`.
            labels: `[batch, label]`, from the end of the first patch on.
            revin: normalise both by the context's statistics first.
        """
        values, targets = (series.to(working_dtype(series.dtype)) for series in (context, labels))
        if revin:
            mean, scale = _statistics(values)
            values, targets = (values - mean) / scale, (targets - mean) / scale
        hidden = self.model(self._patches(values))
        losses = []
        for head, length in zip(self.lm_heads, self.output_lengths, strict=True):
            windows = label_windows(targets, hidden.shape[1], length, self.patch)
            losses.append((head(hidden).to(windows.dtype) - windows).square().mean(dim=-1))
        return torch.stack(losses).mean(dim=0)

    def _patches(self, context: Tensor) -> Tensor:
        return context.unfold(1, self.patch, self.patch)


def _statistics(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased standard deviation, `[batch, 1]` each, constants with respect to gradients."""
    values = values.detach()
    deviation = values.std(dim=1, keepdim=True)
    scale = torch.where(deviation > SMALLEST_SCALE, deviation, torch.ones_like(deviation))
    return values.mean(dim=1, keepdim=True), scale


class TimerBackbone(PatchBackbone):
    """Timer-XL.

    Args:
        model: the wrapped model.
        context_length: past steps to feed; cut from the left to whole patches.
        rollout: beyond one block, `"reference"` feeds each block alone, normalised by its own statistics, against the
            cached past, as the published code does; `"context"` normalises and runs all steps so far again.
        instance_norm: normalise each series in `loss` as in the forecast. Off, as in the model's own training.
        checkpoint, revision: where the weights came from.
    """

    name = "timer"
    default_checkpoint = "thuml/timer-base-84m"
    summary = "Timer-XL 84M: decoder-only transformer, point forecasts, patches of 96"
    licence = "Apache-2.0"

    model: TimerForPrediction

    @classmethod
    def model_class(cls) -> type[TimerForPrediction]:
        return TimerForPrediction

    def __init__(
        self,
        model: TimerForPrediction,
        *,
        context_length: int | None = None,
        rollout: Literal["reference", "context"] = "reference",
        instance_norm: bool = False,
        checkpoint: str | None = None,
        revision: str | None = None,
    ) -> None:
        if rollout not in ("reference", "context"):
            raise SettingError(f"rollout={rollout!r}: expected 'reference' or 'context'")
        super().__init__(model, model.config, context_length=context_length, checkpoint=checkpoint, revision=revision)
        self.rollout = rollout
        self.instance_norm = instance_norm
        self.freeze()

    def native(self, context: Tensor) -> Tensor:
        return self(context)

    def forward(self, context: Tensor, horizon: int | None = None) -> Tensor:
        self.check_context(context.shape[1])
        context = self.guarded(context)
        return self.model.rollout(context, horizon or self.native_horizon, use_cache=self.rollout == "reference")

    def distribution(
        self, context: Tensor, horizon: int | None = None, *, generator: torch.Generator | None = None
    ) -> Forecast:
        del generator
        return Forecast(self(context, horizon))

    def loss(
        self, context: Tensor, labels: Tensor, *, horizon: int | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Squared error of the next output at every patch, `[series, token]`, whatever the horizon."""
        del horizon, generator
        return self.model.token_loss(*self._whole_patches(self.guarded(context), labels), revin=self.instance_norm)
