"""Fracast-0: the smallest of the backbones, with its weights inside the package `fracast`."""

from __future__ import annotations

from pathlib import Path

import fracast
import torch
from safetensors.torch import load_file
from torch import Tensor

from dualweaver.backbones.fracast.core import FracastConfig, FracastModel
from dualweaver.backbones.headers import refuse_misfits
from dualweaver.backbones.quantiles import QuantileBackbone
from dualweaver.errors import CheckpointError, SettingError

__all__ = ["FracastBackbone"]

_CONTEXT = 512
_MIN_CONTEXT = 8  # as in the package
_SPAN_FLOOR = 1e-5


class FracastBackbone(QuantileBackbone):
    """Fracast-0: nine quantiles of 48 steps; contexts of 8 to 2048 steps, longer horizons rolled forward.

    The window of the model has `context_length` steps, as if the package were configured for it. A shorter context
    fills the window's end and the rest counts as unobserved; that is how the package treats short series, so that the
    two agree at every length. A longer one is cut.
    """

    name = "fracast"
    summary = "Fracast-0, 85 k parameters, context up to 2048, horizon 48, nine quantiles, weights included"
    licence = "Apache-2.0"

    def __init__(
        self,
        model: FracastModel,
        *,
        context_length: int = _CONTEXT,
        checkpoint: str | None = None,
        revision: str | None = None,
    ) -> None:
        config = model.config
        super().__init__(
            context_length=context_length,
            native_horizon=config.horizon,
            min_context=_MIN_CONTEXT,
            max_context=config.W,
            quantile_levels=config.quantiles,
            checkpoint=checkpoint,
            revision=revision,
        )
        self.model = model
        self.freeze()

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: str | None,
        *,
        revision: str | None = None,
        context_length: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> FracastBackbone:
        """Load the weights in the package, or those in a directory with its `config.json` and `model.safetensors`."""
        if revision is not None:
            raise SettingError(f"revision={revision!r}: Fracast is loaded from a directory, which has no revisions")
        directory = Path(fracast.__file__).parent / "weights" if checkpoint is None else Path(checkpoint)
        model = _load(directory).to(dtype or torch.float32)
        context_length = _CONTEXT if context_length is None else context_length
        return cls(model, context_length=context_length, checkpoint=checkpoint)

    def native(self, context: Tensor) -> Tensor:
        """`[series, time]` to `[series, 48, 9]`; the window is scaled by its minimum and its range."""
        context = context[:, -self.context_length :]
        low = context.amin(dim=1, keepdim=True)
        span = (context.amax(dim=1, keepdim=True) - low).clamp_min(_SPAN_FLOOR)
        scaled = ((context - low) / span).to(next(self.model.parameters()).dtype)
        quantiles = self.model(scaled, self.context_length).to(context.dtype)
        return quantiles * span[..., None] + low[..., None]

    def _roll(self, context: Tensor, horizon: int) -> Tensor:
        """As in the base class, but a context shorter than the window grows into it, as in the package."""
        self.check_context(context.shape[1])
        blocks = [self.one_block(context)]
        while len(blocks) * self.native_horizon < horizon:
            context = torch.cat([context[:, -self.context_length :], self._point(blocks[-1])], dim=1)
            blocks.append(self.one_block(context))
        return torch.cat(blocks, dim=1)[:, :horizon]


def _load(directory: Path) -> FracastModel:
    """The float32 weights of a release directory.

    Raises:
        CheckpointError: naming the file or the tensor that is missing, damaged or foreign.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory; Fracast takes one with config.json, model.safetensors")
    config_file, weights_file = directory / "config.json", directory / "model.safetensors"
    for file in (config_file, weights_file):
        if not file.is_file():
            raise CheckpointError(f"{directory}: {file.name} is missing")
    config = FracastConfig.from_file(config_file)
    refuse_misfits(weights_file, vars(config), lambda: FracastModel(config), [weights_file])
    model, found = FracastModel(config), load_file(weights_file)
    foreign = sorted(found.keys() - model.state_dict().keys())
    if foreign:
        raise CheckpointError(f"{weights_file}: tensor {foreign[0]!r} is not one of this model's")
    model.load_state_dict(found)
    return model
