"""TimesFM 2.5 (Google), a decoder over patches of 32 steps, in the implementation of the transformers library.

Source: Das et al., "A decoder-only foundation model for time-series forecasting", arXiv 2310.10688; the public
checkpoint `google/timesfm-2.5-200m-transformers`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from dualweaver.backbones.pretrained import PretrainedBackbone
from dualweaver.backbones.quantiles import QuantileBackbone
from dualweaver.errors import SettingError

if TYPE_CHECKING:
    from transformers import TimesFm2_5ModelForPrediction

__all__ = ["TimesFMBackbone"]

_CONTEXT = 2048  # of up to 16384; every step costs


class TimesFMBackbone(PretrainedBackbone, QuantileBackbone):
    """TimesFM 2.5: nine quantiles of 128 steps; longer horizons are rolled forward by the median.

    The context is cut from the left to whole patches, since the steps that the library would pad it with take part in
    its mean and deviation. Neither the library's flip averaging (this package forecasts a series and its mirror image
    itself) nor its cut at zero is used, so forecasts differ from its defaults where those change something.

    Args:
        model: the wrapped model.
        context_length: past steps to feed, 2048 where None, or all that the model takes, if that is fewer.
        checkpoint, revision: where the weights came from.
    """

    name = "timesfm"
    default_checkpoint = "google/timesfm-2.5-200m-transformers"
    summary = "TimesFM 2.5, 200M: decoder-only transformer, patches of 32, horizon 128, nine quantiles"
    licence = "Apache-2.0"
    large_products = True
    flat_is_constant = True
    renamed: ClassVar = {"ff0": "fc1", "ff1": "fc2"}  # in published files, and in the library

    def __init__(
        self,
        model: TimesFm2_5ModelForPrediction,
        *,
        context_length: int | None = None,
        checkpoint: str | None = None,
        revision: str | None = None,
    ) -> None:
        config: Any = model.config
        super().__init__(
            context_length=min(_CONTEXT, config.context_length) if context_length is None else context_length,
            native_horizon=config.horizon_length,
            min_context=config.patch_length,
            max_context=config.context_length,
            quantile_levels=config.quantiles,
            checkpoint=checkpoint,
            revision=revision,
        )
        self.model = model
        self.patch: int = config.patch_length
        model.model._update_running_stats = _running_statistics
        self.freeze()

    @classmethod
    def model_class(cls) -> type[TimesFm2_5ModelForPrediction]:
        try:
            from transformers import TimesFm2_5ModelForPrediction
        except ImportError as error:
            raise SettingError(
                "backbone='timesfm': the installed transformers does not know TimesFM 2.5; pip install -U transformers"
            ) from error
        return TimesFm2_5ModelForPrediction

    def native(self, context: Tensor) -> Tensor:
        """`[series, time]` to `[series, 128, 9]`."""
        whole = context[:, context.shape[1] % self.patch :]
        values = whole if whole.dtype == torch.float64 else whole.float()
        output: Any = self.model(
            past_values=list(values),
            forecast_context_len=values.shape[1],
            truncate_negative=False,
            force_flip_invariance=False,
        )
        return output.full_predictions[..., 1:].to(context.dtype)  # the first is the mean


def _running_statistics(
    count: Tensor, mean: Tensor, deviation: Tensor, values: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and deviation of all steps so far, each `[series]`, after the `[series, step]` of one more patch.

    As in the library, but where nothing has moved so far, the deviation of zero has a gradient of zero; the library's
    square root has none there, so that a series that begins with a constant stretch could not be trained through.
    """
    seen = (~mask).to(values.dtype)
    added = seen.sum(dim=-1)
    total = count + added
    of_patch = (values * seen).sum(dim=-1) / added.clamp_min(1)
    spread = (((values - of_patch[:, None]) * seen) ** 2).sum(dim=-1)
    new_mean = (count * mean + added * of_patch) / total.clamp_min(1)
    between = count * (mean - new_mean) ** 2 + added * (of_patch - new_mean) ** 2
    variance = (count * deviation**2 + spread + between) / total.clamp_min(1)
    moved = variance > 0
    new_deviation = torch.where(moved, torch.where(moved, variance, 1).sqrt(), 0)
    return total, new_mean, new_deviation
