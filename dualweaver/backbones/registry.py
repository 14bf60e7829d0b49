"""Backbones by name: those that ship, those of other packages, those registered while a program runs."""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import torch
from torch import nn

from dualweaver.backbones.base import Backbone, ModuleBackbone
from dualweaver.errors import SettingError
from dualweaver.notices import notify

__all__ = ["GROUP", "available_backbones", "load_backbone", "register_backbone"]

GROUP = "dualweaver.backbones"  # entry points by which other packages add backbones, see docs/backbones.md

# imported on first use, so that one backbone does not pay for the others' libraries
_SHIPPED = {
    "fracast": "dualweaver.backbones.fracast:FracastBackbone",
    "ttm": "dualweaver.backbones.ttm:TTMBackbone",
    "timer": "dualweaver.backbones.timer:TimerBackbone",
    "loom": "dualweaver.backbones.loom:LoomBackbone",
    "sundial": "dualweaver.backbones.sundial:SundialBackbone",
    "timesfm": "dualweaver.backbones.timesfm:TimesFMBackbone",
    "chronos-bolt": "dualweaver.backbones.chronos:ChronosBoltBackbone",
    "chronos-2": "dualweaver.backbones.chronos:Chronos2Backbone",
    "flowstate": "dualweaver.backbones.flowstate:FlowStateBackbone",
}
_registered: dict[str, type[Backbone]] = {}


def register_backbone(name: str, backbone: type[Backbone]) -> None:
    """Make a backbone of your own loadable as `load_backbone(name)` in this process.

    A package does this for everyone who installs it by an entry point, see docs/backbones.md.
    """
    if name in _known():
        raise SettingError(f"a backbone named {name!r} is registered already")
    _registered[name] = backbone


def available_backbones() -> dict[str, type[Backbone]]:
    """The registered backbones by name; those of other packages that cannot be imported are named in a notice."""
    found = {}
    for name in _known():
        try:
            found[name] = backbone_class(name)
        except SettingError as error:
            notify(str(error))
    return found


def backbone_class(name: str) -> type[Backbone]:
    """The class behind a name.

    Raises:
        SettingError: there is none, or the package that registers it cannot be imported or gives something else.
    """
    if name in _registered:
        return _registered[name]
    if name in _SHIPPED:
        module, _, attribute = _SHIPPED[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    installed = _installed()
    if name not in installed:
        raise SettingError(f"unknown backbone {name!r}; known are {', '.join(sorted(_known()))}")
    entry = installed[name]
    try:
        found = entry.load()
    except Exception as error:  # whatever importing somebody else's code raises
        raise SettingError(f"the backbone {name!r} of {_origin(entry)} cannot be imported ({error})") from error
    if not (isinstance(found, type) and issubclass(found, Backbone)):
        raise SettingError(f"the backbone {name!r} of {_origin(entry)} is no subclass of dualweaver.backbones.Backbone")
    return found


def _known() -> list[str]:
    return list(dict.fromkeys([*_SHIPPED, *_installed(), *_registered]))


def _installed() -> dict[str, EntryPoint]:
    """What other packages register; a name that ships with us stays ours."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _origin(entry: EntryPoint) -> str:
    return f"the package {entry.dist.name!r}" if entry.dist else entry.value


def load_backbone(
    backbone: str | nn.Module, *, context_length: int | None = None, dtype: torch.dtype | None = None
) -> Backbone:
    """A frozen backbone from a name, a name with a checkpoint, or a module.

    Args:
        backbone: `"ttm"`, `"ttm:directory"`, `"timer:thuml/timer-base-84m"`, `"timer:hub/name@revision"`, a `Backbone`,
            or any `torch.nn.Module` that maps `[series, context_length]` to `[series, horizon]`.
        context_length: past steps to feed, the backbone's own default where None.
        dtype: of the weights, the checkpoint's own where None.

    Raises:
        SettingError: unknown name, or a context length that the backbone cannot take.
        CheckpointError: weights that are missing, damaged or foreign.
    """
    if isinstance(backbone, Backbone):
        return backbone.freeze()
    if isinstance(backbone, nn.Module):
        if context_length is None:
            raise SettingError("context_length is required when the backbone is a module of your own")
        return ModuleBackbone(backbone, context_length=context_length)
    if not isinstance(backbone, str):
        raise SettingError(f"backbone={backbone!r}: expected a name, a Backbone or a torch.nn.Module")
    name, _, source = backbone.partition(":")
    checkpoint, revision = (source or None), None
    if checkpoint and "@" in checkpoint and not Path(checkpoint).exists():
        checkpoint, revision = checkpoint.rsplit("@", 1)
    loaded = backbone_class(name).from_checkpoint(
        checkpoint, revision=revision, context_length=context_length, dtype=dtype
    )
    return loaded.freeze()
