"""TinyTimeMixer R2 (IBM Granite), an attention-free point forecaster of 0.8 M parameters.

Source: Ekambaram et al., "Tiny Time Mixers", arXiv 2401.03955, section 3; the public checkpoint
`ibm-granite/granite-timeseries-ttm-r2` (512 steps of context, 96 steps ahead). Patches of the standardised context are
mixed along time and along features by small gated MLPs, at a coarse-to-fine ladder of patch lengths.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from dualweaver.backbones.base import Backbone
from dualweaver.backbones.pretrained import load_pretrained
from dualweaver.backbones.ttm.frozen import Affine, FrozenChain, Head, Mixer, Regroup, Step
from dualweaver.compute.recompute import recomputable
from dualweaver.errors import CheckpointError, SettingError

__all__ = ["TTMBackbone", "TinyTimeMixerConfig", "TinyTimeMixerForPrediction"]


class TinyTimeMixerConfig(PretrainedConfig):
    """Shape of a TinyTimeMixer; the names are those of the public checkpoints' `config.json`.

    Settings that the public family knows and this implementation does not (channel mixing, exogenous channels,
    frequency tokens, another norm) are refused when the model is built.
    """

    model_type = "tinytimemixer"

    def __init__(
        self,
        context_length: int = 512,
        prediction_length: int = 96,
        patch_length: int = 64,
        d_model: int = 192,
        num_layers: int = 2,
        adaptive_patching_levels: int = 3,
        expansion_factor: int = 2,
        decoder_d_model: int = 128,
        decoder_num_layers: int = 2,
        dropout: float = 0.4,
        head_dropout: float = 0.4,
        norm_eps: float = 1e-5,
        **kwargs: Any,
    ) -> None:
        self.context_length = context_length
        self.prediction_length = prediction_length
        self.patch_length = patch_length
        self.d_model = d_model
        self.num_layers = num_layers
        self.adaptive_patching_levels = adaptive_patching_levels
        self.expansion_factor = expansion_factor
        self.decoder_d_model = decoder_d_model
        self.decoder_num_layers = decoder_num_layers
        self.dropout = dropout
        self.head_dropout = head_dropout
        self.norm_eps = norm_eps
        super().__init__(**kwargs)

    @property
    def patches(self) -> int:
        return self.context_length // self.patch_length


# what this implementation computes; a checkpoint that asks for something else must not load in silence
_REQUIRED = {
    "mode": "common_channel",
    "decoder_mode": "common_channel",
    "scaling": "std",
    "norm_mlp": "LayerNorm",
    "gated_attn": True,
    "self_attn": False,
    "use_decoder": True,
    "use_positional_encoding": False,
    "resolution_prefix_tuning": False,
    "decoder_adaptive_patching_levels": 0,
    "decoder_raw_residual": False,
    "enable_forecast_channel_mixing": False,
}


def _frozen(parts: Iterable[Any]) -> list[Step]:
    """The links of a chain for parts that follow each other."""
    return [step for part in parts for step in part.frozen()]


class _Norm(nn.Module):
    def __init__(self, features: int, eps: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class _MLP(nn.Module):
    def __init__(self, size: int, expansion: int, dropout: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(size, size * expansion)
        self.fc2 = nn.Linear(size * expansion, size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.fc2(self.dropout(nn.functional.gelu(self.fc1(x)))))


class _Gate(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.attn_layer = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.attn_layer(x).softmax(dim=-1)


class _Mixer(nn.Module):
    """Norm over features, then a gated MLP along features, or along patches, added to the input.

    Input and output `[series, patch, feature]`.
    """

    def __init__(self, config: TinyTimeMixerConfig, features: int, size: int, along_patches: bool) -> None:
        super().__init__()
        self.along_patches = along_patches
        self.norm = _Norm(features, config.norm_eps)
        self.mlp = _MLP(size, config.expansion_factor, config.dropout)
        self.gating_block = _Gate(size)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.norm(x)
        if self.along_patches:
            return x + self.gating_block(self.mlp(mixed.transpose(1, 2))).transpose(1, 2)
        return x + self.gating_block(self.mlp(mixed))

    def frozen(self) -> Step:
        return Mixer(
            self.norm.norm, self.mlp.fc1, self.mlp.fc2, self.gating_block.attn_layer, along_patches=self.along_patches
        )


class _Layer(nn.Module):
    def __init__(self, config: TinyTimeMixerConfig, patches: int, features: int) -> None:
        super().__init__()
        self.patch_mixer = _Mixer(config, features, patches, along_patches=True)
        self.feature_mixer = _Mixer(config, features, features, along_patches=False)

    @recomputable
    def forward(self, x: Tensor) -> Tensor:
        return self.feature_mixer(self.patch_mixer(x))

    def frozen(self) -> list[Step]:
        return [self.patch_mixer.frozen(), self.feature_mixer.frozen()]


class _AdaptiveBlock(nn.Module):
    """Layers that see every patch as `factor` shorter ones of fewer features (row-major)."""

    def __init__(self, config: TinyTimeMixerConfig, factor: int) -> None:
        super().__init__()
        self.factor = factor
        patches, features = config.patches * factor, config.d_model // factor
        self.mixer_layers = nn.ModuleList(_Layer(config, patches, features) for _ in range(config.num_layers))

    def forward(self, x: Tensor) -> Tensor:
        series, patches, features = x.shape
        x = x.reshape(series, patches * self.factor, features // self.factor)
        for layer in self.mixer_layers:
            x = layer(x)
        return x.reshape(series, patches, features)

    def frozen(self) -> list[Step]:
        return [Regroup(self.factor, split=True), *_frozen(self.mixer_layers), Regroup(self.factor, split=False)]


class _MixerEncoder(nn.Module):
    def __init__(self, config: TinyTimeMixerConfig) -> None:
        super().__init__()
        levels = config.adaptive_patching_levels
        self.mixers = nn.ModuleList(_AdaptiveBlock(config, 2**level) for level in reversed(range(levels)))

    def forward(self, x: Tensor) -> Tensor:
        for mixer in self.mixers:
            x = mixer(x)
        return x

    def frozen(self) -> list[Step]:
        return _frozen(self.mixers)


class _Encoder(nn.Module):
    def __init__(self, config: TinyTimeMixerConfig) -> None:
        super().__init__()
        self.patcher = nn.Linear(config.patch_length, config.d_model)
        self.mlp_mixer_encoder = _MixerEncoder(config)

    def forward(self, patches: Tensor) -> Tensor:
        return self.mlp_mixer_encoder(self.patcher(patches))


class _Body(nn.Module):
    def __init__(self, config: TinyTimeMixerConfig) -> None:
        super().__init__()
        self.encoder = _Encoder(config)


class _DecoderBlock(nn.Module):
    def __init__(self, config: TinyTimeMixerConfig) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(
            _Layer(config, config.patches, config.decoder_d_model) for _ in range(config.decoder_num_layers)
        )

    def frozen(self) -> list[Step]:
        return _frozen(self.mixers)


class _Decoder(nn.Module):
    def __init__(self, config: TinyTimeMixerConfig) -> None:
        super().__init__()
        self.adapter = nn.Linear(config.d_model, config.decoder_d_model)
        self.decoder_block = _DecoderBlock(config)

    def forward(self, x: Tensor) -> Tensor:
        x = self.adapter(x)
        for layer in self.decoder_block.mixers:
            x = layer(x)
        return x


class _Head(nn.Module):
    def __init__(self, config: TinyTimeMixerConfig) -> None:
        super().__init__()
        self.dropout = nn.Dropout(config.head_dropout)
        self.base_forecast_block = nn.Linear(config.patches * config.decoder_d_model, config.prediction_length)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_forecast_block(self.dropout(x.flatten(1)))


class TinyTimeMixerForPrediction(PreTrainedModel):
    """The network: `[series, context_length]` to `[series, prediction_length]`, in the units of its input."""

    config_class = TinyTimeMixerConfig
    base_model_prefix = "model"
    main_input_name = "context"

    def __init__(self, config: TinyTimeMixerConfig) -> None:
        super().__init__(config)
        for name, expected in _REQUIRED.items():
            if getattr(config, name, expected) != expected:
                raise CheckpointError(
                    f"this TinyTimeMixer asks for {name}={getattr(config, name)!r}; supported is {expected!r}"
                )
        if config.context_length % config.patch_length:
            raise CheckpointError(
                f"context_length={config.context_length} is not a multiple of patch_length={config.patch_length}"
            )
        self.backbone = _Body(config)
        self.decoder = _Decoder(config)
        self.head = _Head(config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.reset_parameters()

    def forward(self, context: Tensor) -> Tensor:
        mean = context.mean(dim=1, keepdim=True)
        centred = context - mean
        scale = (centred.square().mean(dim=1, keepdim=True) + 1e-5).sqrt()
        patches = (centred / scale).unflatten(1, (-1, self.config.patch_length)).to(self.dtype)
        trained = torch.is_grad_enabled() and any(weight.requires_grad for weight in self.parameters())
        network = self._plain if trained or self.training else self._frozen()
        return network(patches).to(context.dtype) * scale + mean

    def _plain(self, patches: Tensor) -> Tensor:
        return self.head(self.decoder(self.backbone.encoder(patches)))

    def _frozen(self) -> FrozenChain:
        """The same network, for weights that are not trained and without dropout."""
        encoder, decoder, head = self.backbone.encoder, self.decoder, self.head.base_forecast_block
        steps: list[Step] = [Affine(encoder.patcher.weight, encoder.patcher.bias)]
        steps += encoder.mlp_mixer_encoder.frozen()
        steps.append(Affine(decoder.adapter.weight, decoder.adapter.bias))
        steps += decoder.decoder_block.frozen()
        return FrozenChain([*steps, Head(head.weight, head.bias, self.config.patches)])


class TTMBackbone(Backbone):
    """TinyTimeMixer R2: contexts of exactly `context_length` steps, point forecasts, longer horizons rolled forward."""

    name = "ttm"
    default_checkpoint = "ibm-granite/granite-timeseries-ttm-r2"
    summary = "TinyTimeMixer R2, 0.8 M parameters, context 512, horizon 96, points"
    licence = "Apache-2.0"

    def __init__(
        self, model: TinyTimeMixerForPrediction, *, checkpoint: str | None = None, revision: str | None = None
    ) -> None:
        length = model.config.context_length
        super().__init__(
            context_length=length,
            min_context=length,
            max_context=length,
            native_horizon=model.config.prediction_length,
            checkpoint=checkpoint,
            revision=revision,
        )
        self.model = model

    def native(self, context: Tensor) -> Tensor:
        return self.model(context)

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: str | None,
        *,
        revision: str | None = None,
        context_length: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> TTMBackbone:
        checkpoint = checkpoint or cls.default_checkpoint
        model = load_pretrained(TinyTimeMixerForPrediction, checkpoint, revision=revision, dtype=dtype)
        backbone = cls(model, checkpoint=checkpoint, revision=revision)
        if context_length is not None and context_length != backbone.context_length:
            raise SettingError(
                f"context_length={context_length}: this TinyTimeMixer takes exactly {backbone.context_length} steps"
            )
        return backbone
