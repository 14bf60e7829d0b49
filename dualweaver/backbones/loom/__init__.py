"""Loom: this package's own patch mixer and its weights."""

from dualweaver.backbones.loom.model import LoomBackbone, LoomConfig, LoomModel

__all__ = ["LoomBackbone", "LoomConfig", "LoomModel"]
