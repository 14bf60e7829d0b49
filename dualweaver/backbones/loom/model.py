"""Loom, a patch mixer of this package's own: nine quantiles of 96 steps, weights included.

A standardised context is cut into patches, which small networks mix along time and along features in turn. A linear
map of the whole context is added to what they say. How the weights were trained is in `experiments/pretrain` and
docs/loom.md.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dualweaver.backbones.base import Backbone
from dualweaver.backbones.headers import refuse_misfits
from dualweaver.compute.products import Linear
from dualweaver.compute.recompute import recomputable
from dualweaver.errors import CheckpointError, SettingError

__all__ = ["LoomBackbone", "LoomConfig", "LoomModel", "load_loom", "save_loom"]

CONFIG, WEIGHTS = "loom.json", "loom.safetensors"
_MIN_CONTEXT = 32
_RELATIVE_FLOOR = 1e-6  # of the deviation, in units of the mean: below it float32 holds no digits of the shape
_ABSOLUTE_FLOOR = 1e-12
_CHUNK = 128  # series whose activations stay in the processor's cache


@dataclass(frozen=True)
class LoomConfig:
    """Shape of the network."""

    context_length: int = 512
    horizon: int = 96
    patch_length: int = 32
    width: int = 128
    layers: int = 4
    expansion: int = 2
    spread_rank: int = 48
    quantiles: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)

    @property
    def patches(self) -> int:
        return self.context_length // self.patch_length


class _Mixer(nn.Module):
    """A norm over features and a network of one hidden layer, added to its input `[patch, series, feature]`."""

    def __init__(self, features: int, size: int, expansion: int, along_patches: bool) -> None:
        super().__init__()
        self.along_patches = along_patches
        self.norm = nn.LayerNorm(features)
        self.up = Linear(size, size * expansion)
        self.down = Linear(size * expansion, size)

    def forward(self, x: Tensor) -> Tensor:
        normal = self.norm(x)
        if not self.along_patches:
            return x + self.down(F.gelu(self.up(normal), approximate="tanh"))
        # patches are the first axis, so that mixing them is one product and nothing is transposed
        hidden = F.gelu(torch.addmm(self.up.bias[:, None], self.up.weight, normal.flatten(1)), approximate="tanh")
        return x + torch.addmm(self.down.bias[:, None], self.down.weight, hidden).view_as(x)


class LoomModel(nn.Module):
    """The network: standardised contexts `[series, time]` to `[series, horizon, level]`, in the same units.

    The middle level is trained on the squared error, so that it is the point forecast. The others are reached from it
    by steps that are never negative, so that levels cannot cross.
    """

    def __init__(self, config: LoomConfig) -> None:
        super().__init__()
        self.config = config
        patches, width = config.patches, config.width
        self.embed = Linear(config.patch_length, width)
        self.position = nn.Parameter(torch.randn(patches, 1, width) * 0.02)
        self.missing = nn.Parameter(torch.randn(patches, 1, width) * 0.02)
        self.mixers = nn.ModuleList(
            _Mixer(width, size, config.expansion, along)
            for _ in range(config.layers)
            for size, along in ((patches, True), (width, False))
        )
        self.norm = nn.LayerNorm(width)
        self.direct = Linear(config.context_length, config.horizon, bias=False)
        self.centre = Linear(patches * width, config.horizon)
        self.narrow = Linear(patches * width, config.spread_rank)
        self.spread = Linear(config.spread_rank, config.horizon * (len(config.quantiles) - 1))
        nn.init.zeros_(self.direct.weight)
        nn.init.constant_(self.spread.bias, -1.5)

    def forward(self, context: Tensor, observed: int) -> Tensor:
        """All levels; of the context, the first `context_length - observed` steps are zeros that stand for nothing."""
        point, offsets = self.parts(context, observed)
        half = len(self.config.quantiles) // 2
        below, above = offsets[..., :half].cumsum(-1).flip(-1), offsets[..., half:].cumsum(-1)
        return torch.cat([point - below, point, point + above], dim=-1)

    def parts(self, context: Tensor, observed: int) -> tuple[Tensor, Tensor]:
        """The middle level `[series, horizon, 1]` and the steps to the others, outwards, those below first."""
        config = self.config
        x = context.unflatten(1, (-1, config.patch_length)).transpose(0, 1)
        x = self.embed(x) + (self.position + self._missing_share(observed) * self.missing)
        for mixer in self.mixers:
            x = mixer(x)
        flat = self.norm(x).transpose(0, 1).flatten(1)
        point = self.centre(flat) + self.direct(context)
        offsets = F.softplus(self.spread(F.gelu(self.narrow(flat), approximate="tanh")))
        return point[..., None], offsets.unflatten(1, (config.horizon, -1))

    def _missing_share(self, observed: int) -> Tensor:
        """Which share of each patch is not observed: `[patch, 1, 1]`."""
        config = self.config
        ends = torch.arange(1, config.patches + 1, device=self.position.device) * config.patch_length
        seen = ends - (config.context_length - observed)
        return 1 - (seen / config.patch_length).clamp(0, 1).to(self.position.dtype)[:, None, None]


class LoomBackbone(Backbone):
    """Loom: nine quantiles of 96 steps; contexts of 32 to 512 steps, longer horizons rolled forward.

    The point forecast is the middle level. A context shorter than 512 steps fills the end of the window, and the rest
    counts as not observed.
    """

    name = "loom"
    summary = "Loom, 0.66 M parameters, context up to 512, horizon 96, nine quantiles; weights included"
    licence = "Apache-2.0"

    def __init__(self, model: LoomModel, *, context_length: int | None = None, checkpoint: str | None = None) -> None:
        config = model.config
        super().__init__(
            context_length=config.context_length if context_length is None else context_length,
            native_horizon=config.horizon,
            min_context=_MIN_CONTEXT,
            max_context=config.context_length,
            quantile_levels=config.quantiles,
            checkpoint=checkpoint,
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
    ) -> LoomBackbone:
        """Load the weights in this package, or those in a directory with its `loom.json` and `loom.safetensors`."""
        if revision is not None:
            raise SettingError(f"revision={revision!r}: Loom is loaded from a directory, which has no revisions")
        model = load_loom(Path(__file__).parent if checkpoint is None else Path(checkpoint))
        return cls(model.to(dtype or torch.float32), context_length=context_length, checkpoint=checkpoint)

    def native(self, context: Tensor) -> Tensor:
        """`[series, time]` to `[series, 96, 9]`, in the units of the context."""
        context = context[:, -self.model.config.context_length :]
        scaled, mean, scale = standardise(context)
        scaled = F.pad(scaled, (self.model.config.context_length - context.shape[1], 0))
        scaled = scaled.to(self.model.position.dtype)
        parts = [self._layers(rows, context.shape[1]) for rows in scaled.split(_CHUNK)]
        return torch.cat(parts).to(context.dtype) * scale[..., None] + mean[..., None]

    @recomputable
    def _layers(self, scaled: Tensor, observed: int) -> Tensor:
        return self.model(scaled, observed)


def standardise(context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A context `[series, time]` without its mean and in units of its deviation; and both, `[series, 1]`.

    The deviation has a floor, so that a constant context has a forecast and gradients.
    """
    mean = context.mean(dim=1, keepdim=True)
    centred = context - mean
    floor = _RELATIVE_FLOOR * mean.detach().abs() + _ABSOLUTE_FLOOR
    scale = (centred.square().mean(dim=1, keepdim=True) + floor.square()).sqrt()
    return centred / scale, mean, scale


def save_loom(model: LoomModel, directory: Path) -> None:
    """Write the configuration and the weights that `load_loom` reads."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG).write_text(json.dumps(asdict(model.config), indent=1) + "\n", encoding="utf-8")
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, directory / WEIGHTS)


def load_loom(directory: Path) -> LoomModel:
    """The weights of a directory.

    Raises:
        CheckpointError: naming the file or the tensor that is missing, damaged or foreign.
    """
    config_file, weights_file = directory / CONFIG, directory / WEIGHTS
    for file in (config_file, weights_file):
        if not file.is_file():
            raise CheckpointError(f"{directory}: {file.name} is missing")
    try:
        told = json.loads(config_file.read_text(encoding="utf-8"))
        config = LoomConfig(**{**told, "quantiles": tuple(told["quantiles"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{config_file} is no configuration of Loom ({error})") from error
    refuse_misfits(weights_file, vars(config), lambda: LoomModel(config), [weights_file])
    model, found = LoomModel(config), load_file(weights_file)
    foreign = sorted(found.keys() - model.state_dict().keys())
    if foreign:
        raise CheckpointError(f"{weights_file}: tensor {foreign[0]!r} is not one of this model's")
    model.load_state_dict(found)
    return model
