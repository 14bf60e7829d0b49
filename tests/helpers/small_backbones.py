"""Small backbones with random weights (the embedded ones with theirs), a way to make each, and series for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from foreign import NO_CHRONOS
from torch import Tensor, nn
from transformers import TimesFm2_5Config, TimesFm2_5ModelForPrediction

from dualweaver.backbones import Backbone, ModuleBackbone, load_backbone
from dualweaver.backbones.flowstate import FlowStateConfig, FlowStateForPrediction
from dualweaver.backbones.ttm import TinyTimeMixerConfig, TinyTimeMixerForPrediction


def tiny_ttm(**changes: object) -> TinyTimeMixerForPrediction:
    settings = {"context_length": 32, "prediction_length": 8, "patch_length": 8, "d_model": 16, "decoder_d_model": 8}
    torch.manual_seed(0)
    return TinyTimeMixerForPrediction(TinyTimeMixerConfig(**(settings | changes))).eval()  # type: ignore[arg-type]


def tiny_timesfm(**changes: Any) -> TimesFm2_5ModelForPrediction:
    settings: dict[str, Any] = {
        "patch_length": 8,
        "context_length": 96,
        "horizon_length": 16,
        "output_quantile_len": 24,
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 32,
        "head_dim": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "initializer_range": 0.2,
    }
    torch.manual_seed(0)
    return TimesFm2_5ModelForPrediction(TimesFm2_5Config(**(settings | changes))).eval()


def tiny_flowstate(**changes: Any) -> FlowStateForPrediction:
    settings: dict[str, Any] = {
        "context_length": 96,
        "embedding_feature_dim": 16,
        "encoder_num_layers": 2,
        "encoder_state_dim": 8,
        "decoder_patch_len": 12,
        "decoder_dim": 10,
    }
    torch.manual_seed(0)
    return FlowStateForPrediction(FlowStateConfig(**(settings | changes))).eval()


CHRONOS_LEVELS = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
CHRONOS_CONTEXT = 96  # steps that the models take


def randomised(model: nn.Module) -> Any:
    """Weights large enough that the forecast depends on the context."""
    generator = torch.Generator().manual_seed(0)
    for weights in model.parameters():
        if weights.ndim > 1:
            weights.data = torch.randn(weights.shape, generator=generator) / weights.shape[-1] ** 0.5
    return model.eval()


def tiny_bolt() -> Any:
    from chronos.chronos_bolt import ChronosBoltModelForForecasting
    from transformers import T5Config

    config = T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=4, feed_forward_proj="relu"
    )
    config.is_gated_act, config.dense_act_fn, config.decoder_start_token_id, config.pad_token_id = False, "relu", 0, 0
    config.architectures, config.chronos_pipeline_class = ["ChronosBoltModelForForecasting"], "ChronosBoltPipeline"
    config.chronos_config = {
        "context_length": CHRONOS_CONTEXT,
        "prediction_length": 16,
        "input_patch_size": 8,
        "input_patch_stride": 8,
        "quantiles": CHRONOS_LEVELS,
        "use_reg_token": True,
    }
    return randomised(ChronosBoltModelForForecasting(config))


def tiny_2() -> Any:
    from chronos.chronos2 import Chronos2Model
    from chronos.chronos2.config import Chronos2CoreConfig

    config = Chronos2CoreConfig(
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        architectures=["Chronos2Model"],
        chronos_pipeline_class="Chronos2Pipeline",
        chronos_config={
            "context_length": CHRONOS_CONTEXT,
            "input_patch_size": 8,
            "input_patch_stride": 8,
            "output_patch_size": 8,
            "max_output_patches": 3,
            "quantiles": [0.01, 0.05, *(round(0.05 * step, 2) for step in range(2, 19)), 0.95, 0.99],
            "use_reg_token": True,
            "use_arcsinh": True,
        },
    )
    return randomised(Chronos2Model(config))


TINY_CHRONOS: dict[str, Callable[[], Any]] = {"chronos-bolt": tiny_bolt, "chronos-2": tiny_2}


def _module() -> Backbone:
    return ModuleBackbone(nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 8)), context_length=32)


def _fracast() -> Backbone:
    return load_backbone("fracast", context_length=64)


def _loom() -> Backbone:
    return load_backbone("loom", context_length=64)


def _ttm() -> Backbone:
    from dualweaver.backbones import ttm

    config = ttm.TinyTimeMixerConfig(
        context_length=32, prediction_length=8, patch_length=8, d_model=16, decoder_d_model=8
    )
    return ttm.TTMBackbone(ttm.TinyTimeMixerForPrediction(config))


_DECODER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def _timer() -> Backbone:
    from dualweaver.backbones import timer

    config = timer.TimerConfig(input_token_len=8, output_token_lens=(8,), initializer_range=0.2, **_DECODER)
    return timer.TimerBackbone(timer.TimerForPrediction(config), context_length=48)


def _sundial() -> Backbone:
    from dualweaver.backbones import sundial

    config = sundial.SundialConfig(
        input_token_len=8, output_token_lens=(16,), flow_loss_depth=2, num_sampling_steps=4, **_DECODER
    )
    return sundial.SundialBackbone(sundial.SundialForPrediction(config), context_length=48)


def _timesfm() -> Backbone:
    from dualweaver.backbones import timesfm

    return timesfm.TimesFMBackbone(tiny_timesfm(), context_length=48)


def _flowstate() -> Backbone:
    from dualweaver.backbones import flowstate

    return flowstate.FlowStateBackbone(tiny_flowstate(), context_length=48)


def _chronos(name: str) -> Callable[[], Backbone]:
    def build() -> Backbone:
        pytest.importorskip("chronos", reason=NO_CHRONOS)
        from dualweaver.backbones import chronos

        if name == "chronos-bolt":
            return chronos.ChronosBoltBackbone(tiny_bolt(), context_length=48)
        return chronos.Chronos2Backbone(tiny_2(), context_length=48)

    return build


FACTORIES: dict[str, Callable[[], Backbone]] = {
    "module": _module,
    "fracast": _fracast,
    "loom": _loom,
    "ttm": _ttm,
    "timer": _timer,
    "sundial": _sundial,
    "timesfm": _timesfm,
    "flowstate": _flowstate,
    "chronos-bolt": _chronos("chronos-bolt"),
    "chronos-2": _chronos("chronos-2"),
}


def series(backbone: Backbone, count: int = 4, extra: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Waves and noise, `[count, context_length + extra]`."""
    length = backbone.context_length + extra
    time = torch.arange(length, dtype=torch.float64)
    waves = torch.sin(2 * torch.pi * time / torch.tensor([[6.0], [9.0], [13.0], [24.0]], dtype=torch.float64)[:count])
    noise = torch.randn(count, length, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (waves + 0.2 * noise + torch.arange(count, dtype=torch.float64)[:, None]).to(dtype)
