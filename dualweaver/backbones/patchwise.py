"""What backbones that read a series patch by patch have in common: context lengths and the layout of labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from transformers import PreTrainedModel

from dualweaver.backbones.decoder import DecoderConfig
from dualweaver.backbones.pretrained import PretrainedBackbone
from dualweaver.errors import CheckpointError, SettingError

if TYPE_CHECKING:
    pass

__all__ = ["PatchBackbone", "label_windows"]

DEFAULT_CONTEXT = 2880  # what the method's paper feeds to Timer and to Sundial


class PatchBackbone(PretrainedBackbone):
    """A wrapped transformers model, `self.model`, that predicts the next steps at every patch of the context.

    Its loss compares position k (from 0) with the steps that follow patch k. Labels are therefore the window
    `context + future` from the end of the first patch on, and `future` has to hold one full output of the model.
    """

    large_products = True

    model: PreTrainedModel

    def __init__(
        self,
        model: PreTrainedModel,
        config: DecoderConfig,
        *,
        context_length: int | None = None,
        checkpoint: str | None = None,
        revision: str | None = None,
        quantile_levels: tuple[float, ...] = (),
    ) -> None:
        patch = config.input_token_len
        super().__init__(
            context_length=context_length if context_length is not None else max(DEFAULT_CONTEXT // patch, 1) * patch,
            native_horizon=max(config.output_token_lens),
            min_context=patch,
            quantile_levels=quantile_levels,
            checkpoint=checkpoint,
            revision=revision,
        )
        uneven = [length for length in config.output_token_lens if length % patch]
        if uneven:
            raise CheckpointError(f"an output of {uneven[0]} steps is no whole number of patches of {patch}")
        self.model = model
        self.patch = patch
        self.label_output = config.output_token_lens[-1]

    def label_start(self, context_length: int) -> int:
        """The first patch has nothing before it to be predicted from."""
        del context_length
        return self.patch

    def label_horizon(self, horizon: int) -> int:
        """The last position is compared with one full output, whatever horizon the caller is after."""
        del horizon
        return self.label_output

    def _whole_patches(self, context: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Cut both from the left, as for a forecast, so that the last patch ends where the future begins."""
        self.check_context(context.shape[1])
        surplus = context.shape[1] % self.patch
        return context[:, surplus:], labels[:, surplus:]


def label_windows(labels: Tensor, tokens: int, output: int, patch: int) -> Tensor:
    """Overlapping targets of all positions: `[series, label]` to `[series, token, output]`.

    Raises:
        SettingError: the labels end before the last position's output does.
    """
    needed = (tokens - 1) * patch + output
    if labels.shape[1] < needed:
        raise SettingError(f"labels hold {labels.shape[1]} steps; {tokens} patches and {output} outputs need {needed}")
    return labels.unfold(1, output, patch)[:, :tokens]
