"""TinyTimeMixer R2: the model, and what is faster about it while its weights are frozen."""

from dualweaver.backbones.ttm.model import TinyTimeMixerConfig, TinyTimeMixerForPrediction, TTMBackbone

__all__ = ["TTMBackbone", "TinyTimeMixerConfig", "TinyTimeMixerForPrediction"]
