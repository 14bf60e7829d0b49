"""What the recordings of the reference's adapters need beyond the package: its weights, noise and oddities."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from golden import Mode, dtype_of, load, model_directory, outputs
from torch import Tensor

from dualweaver.backbones.sundial import SundialBackbone
from dualweaver.backbones.timer import TimerBackbone

__all__ = [
    "FILE",
    "Replayed",
    "gradients",
    "horizons",
    "inputs",
    "load_weights",
    "renamed",
    "replayed_backbone",
    "window",
]

FILE = "golden.safetensors"

# the reference's names of what the adapters hold, and ours
_NAMES = {"feature_weaver.": "fusion.", "layernorm1": "norm1", "layernorm_2": "norm2"}


class ReplayedTimer(TimerBackbone):
    """Keeps the loss at every token; may generate more steps than it is asked for, as the reference's AdaPTS does."""

    token_losses: Tensor
    generated: int | None = None

    def forward(self, context: Tensor, horizon: int | None = None) -> Tensor:
        return super().forward(context, self.generated or horizon)[:, :horizon]

    def loss(self, context: Tensor, labels: Tensor, **settings: Any) -> Tensor:
        self.token_losses = super().loss(context, labels, **settings)
        return self.token_losses


class ReplayedSundial(SundialBackbone):
    """Keeps the loss at every token; plays recorded noise in place of its own."""

    token_losses: Tensor
    noise: Sequence[Tensor] = ()

    def forward(self, context: Tensor, horizon: int | None = None) -> Tensor:
        return self.sample(context, horizon, len(self.noise[0]) // len(context), noise=self.noise).mean(dim=1)

    def loss(self, context: Tensor, labels: Tensor, **settings: Any) -> Tensor:
        noise, times = self.noise
        self.token_losses = super().loss(context, labels, horizon=settings["horizon"], noise=noise, times=times)
        return self.token_losses


Replayed = ReplayedTimer | ReplayedSundial


def replayed_backbone(name: str, mode: Mode, context_length: int) -> Replayed:
    """The model that the numbers in the folder `name` were recorded with."""
    kind = ReplayedSundial if "sundial" in name else ReplayedTimer
    model = "sundial_a" if "sundial" in name else "timer_b" if "timerb" in name or "timer_b" in name else "timer_a"
    loaded = kind.from_checkpoint(model_directory(model), dtype=dtype_of(mode), context_length=context_length)
    assert isinstance(loaded, ReplayedTimer | ReplayedSundial)
    return loaded


def inputs(name: str, mode: Mode) -> dict[str, Tensor]:
    """Windows, noise and masks of a folder."""
    return {
        key: value.to(dtype_of(mode)) for key, value in load(name, FILE).items() if not key.endswith(("__f32", "__f64"))
    }


def window(given: dict[str, Tensor], backbone: Replayed) -> Tensor:
    """Context and future in one, `[batch, time, channel]`: the recorded labels begin after the first patch."""
    return torch.cat([given["batch_x"][:, : backbone.patch], given["batch_y"]], dim=1)


def horizons(name: str, mode: Mode, pattern: str) -> list[int]:
    """The horizons for which there are outputs of a name such as `train_p(\\d+).loss`."""
    found = (re.fullmatch(pattern, output) for output in outputs(name, FILE, mode))
    return sorted(int(match[1]) for match in found if match)


def load_weights(module: torch.nn.Module, name: str, mode: Mode) -> None:
    """The recorded weights of an adapter."""
    recorded = load(name, "adapter.safetensors")
    module.load_state_dict({_ours(key): value for key, value in recorded.items()})
    module.to(dtype_of(mode))


def gradients(module: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of every parameter, under the reference's names."""
    named = dict(module.named_parameters())
    return {
        renamed(key): gradient
        for key, gradient in zip(named, torch.autograd.grad(loss, list(named.values())), strict=True)
    }


def _ours(key: str) -> str:
    for theirs, ours in _NAMES.items():
        key = key.replace(theirs, ours)
    return key


def renamed(key: str) -> str:
    """The reference's name of a weight of ours."""
    for theirs, ours in _NAMES.items():
        key = key.replace(ours, theirs)
    return key
