"""The published procedure, as its code does the work: the baseline that `speed.py` measures against.

Weights are those of our modules, so that outputs can be compared; the way of computing is the published one:
- attention with an additive mask `[series, 1, token, token]` in float32, made anew in every pass;
- a training step evaluates the fusion four times and the untouched model's loss once more;
- a long forecast without cache runs all steps so far again for every block;
- Sundial's sampler computes condition and modulation for every sample;
- TinyTimeMixer as its public modules write it: one operation after the other, transposes included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualweaver.backbones.decoder import PatchDecoder, rotary_tables
from dualweaver.backbones.sundial import SundialForPrediction
from dualweaver.backbones.timer import TimerForPrediction
from dualweaver.backbones.ttm import TinyTimeMixerForPrediction
from dualweaver.compute import products
from dualweaver.method import Weaver

__all__ = ["sundial_samples", "timer_loss", "timer_rollout", "training_loss", "ttm_forecast"]

SeriesLoss = Callable[[Tensor, Tensor], Tensor]


def training_loss(weaver: Weaver, loss: SeriesLoss, window: Tensor, context: int, label_start: int) -> Tensor:
    """mean(l1 + l2) / 2 + mean(max(upper, l0)) of one batch, every part computed at every step.

    Args:
        weaver: a, b and F.
        loss: context and labels, one series a row, to the model's own loss `[series, position]`.
        window: `[batch, time, channel]`.
        context: steps of the window that are context.
        label_start: where the labels begin.
    """
    x, y = window[:, :context], window[:, label_start:]
    batch, _, channels = x.shape

    def first(part: Tensor) -> Tensor:
        return weaver.a * part + weaver.fusion(part)

    def second(part: Tensor) -> Tensor:
        return -weaver.b * part + weaver.fusion(part)

    inputs = torch.cat([_series(first(x)), _series(second(x))])
    labels = torch.cat([_series(first(y)), _series(second(y))])
    l1, l2 = loss(inputs, labels).mean(dim=1).view(2, batch, channels)
    with torch.no_grad():
        l0 = loss(_series(x), _series(y)).mean(dim=1).view(batch, channels)
    upper = 2 * (l1 + l2) / (weaver.a + weaver.b).square()
    return (l1 + l2).mean() / 2 + torch.maximum(upper, l0).mean()


def timer_loss(model: TimerForPrediction, context: Tensor, labels: Tensor) -> Tensor:
    """Squared error of the next output at every patch, `[series, token]`."""
    output = _timer(model, context)
    windows = labels.unfold(1, output.shape[2], model.patch)[:, : output.shape[1]]
    return (output - windows).square().mean(dim=-1)


def timer_rollout(model: TimerForPrediction, context: Tensor, horizon: int) -> Tensor:
    """Block by block, all steps so far normalised together and run again: `[series, horizon]`."""
    length = context.shape[1]
    while context.shape[1] < length + horizon:
        mean, scale = context.mean(dim=1, keepdim=True), context.std(dim=1, keepdim=True)
        output = _timer(model, (context - mean) / scale)
        context = torch.cat([context, output[:, -1] * scale + mean], dim=1)
    return context[:, length : length + horizon]


def _timer(model: TimerForPrediction, context: Tensor) -> Tensor:
    embedded = F.linear(context.unfold(1, model.patch, model.patch), model.model.embed_layer.emb.weight)
    return F.linear(_decoder(model.model, embedded), model.lm_heads[0].weight)


def sundial_samples(model: SundialForPrediction, context: Tensor, noise: Tensor) -> Tensor:
    """One block of samples, each with a condition and a modulation of its own.

    `[series, time]` and `[sample, output]` to `[series, sample, output]`.
    """
    mean = context.mean(dim=1, keepdim=True)
    scale = context.std(dim=1, keepdim=True, correction=0) + 1e-5
    patches = ((context - mean) / scale).unfold(1, model.patch, model.patch)
    embedded = model.model.embed_layer(torch.cat([patches, torch.ones_like(patches)], dim=-1))
    state = _decoder(model.model, embedded)[:, -1]
    samples, series = len(noise), len(context)
    start = noise.repeat_interleave(series, dim=0)  # samples outermost
    states, moved = state.repeat(samples, 1), start
    for step in range(model.sampling_steps):
        times = torch.full((len(start),), 1000 * step / model.sampling_steps)
        with _plain_products():
            predicted = model.flow_loss.net(moved, times, states)
        moved = moved + (predicted - start) / model.sampling_steps
    return moved.view(samples, series, -1).transpose(0, 1) * scale[:, None] + mean[:, None]


def ttm_forecast(model: TinyTimeMixerForPrediction, context: Tensor) -> Tensor:
    """`[series, 512]` to `[series, 96]`."""
    config = model.config
    mean = context.mean(dim=1, keepdim=True)
    centred = context - mean
    scale = (centred.square().mean(dim=1, keepdim=True) + 1e-5).sqrt()
    x = model.backbone.encoder.patcher((centred / scale).unflatten(1, (-1, config.patch_length)))
    for block in model.backbone.encoder.mlp_mixer_encoder.mixers:
        shape = x.shape
        x = x.reshape(len(x), config.patches * block.factor, config.d_model // block.factor)
        for layer in block.mixer_layers:
            x = _mixer(layer.feature_mixer, _mixer(layer.patch_mixer, x, transpose=True))
        x = x.reshape(shape)
    x = model.decoder.adapter(x)
    for layer in model.decoder.decoder_block.mixers:
        x = _mixer(layer.feature_mixer, _mixer(layer.patch_mixer, x, transpose=True))
    return model.head.base_forecast_block(x.flatten(1)) * scale + mean


@contextmanager
def _plain_products() -> Iterator[None]:
    """Our modules with the products of PyTorch; forward only."""
    ours, products._X86 = products._X86, False
    try:
        yield
    finally:
        products._X86 = ours


def _mixer(mixer: nn.Module, x: Tensor, *, transpose: bool = False) -> Tensor:
    mixed = mixer.norm.norm(x)  # type: ignore[operator, union-attr]
    mixed = mixed.transpose(1, 2) if transpose else mixed
    mixed = mixer.mlp.fc2(F.gelu(mixer.mlp.fc1(mixed)))  # type: ignore[operator, union-attr]
    mixed = mixed * mixer.gating_block.attn_layer(mixed).softmax(dim=-1)  # type: ignore[operator, union-attr]
    return x + (mixed.transpose(1, 2) if transpose else mixed)


def _series(windows: Tensor) -> Tensor:
    return windows.transpose(1, 2).flatten(0, 1)


def _decoder(model: PatchDecoder, hidden: Tensor) -> Tensor:
    """All layers, from the embedded patches; products as PyTorch does them, not as our modules do."""
    series, tokens, _ = hidden.shape
    mask = torch.full((tokens, tokens), torch.finfo(torch.float32).min).triu(1).expand(series, 1, -1, -1).contiguous()
    rotary = rotary_tables(0, tokens, model.head_dim, hidden)
    for layer in model.layers:
        attention, ffn = layer.self_attn, layer.ffn_layer
        inner = layer.norm1(hidden) if layer.norm_first else hidden
        queries, keys, values = (
            F.linear(inner, proj.weight, proj.bias).view(series, tokens, attention.heads, -1).transpose(1, 2)
            for proj in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        mixed = F.scaled_dot_product_attention(_turn(queries, rotary), _turn(keys, rotary), values, attn_mask=mask)
        hidden = hidden + F.linear(mixed.transpose(1, 2).reshape(series, tokens, -1), attention.o_proj.weight)
        hidden = hidden if layer.norm_first else layer.norm1(hidden)
        inner = layer.norm2(hidden) if layer.norm_first else hidden
        gated = F.silu(F.linear(inner, ffn.gate_proj.weight)) * F.linear(inner, ffn.up_proj.weight)
        hidden = hidden + F.linear(gated, ffn.down_proj.weight)
        hidden = hidden if layer.norm_first else layer.norm2(hidden)
    return model.norm(hidden)


def _turn(heads: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * rotary[0] + torch.cat([-second, first], dim=-1) * rotary[1]
