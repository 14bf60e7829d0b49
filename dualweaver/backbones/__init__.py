"""Frozen univariate forecasters by name: the contract (`base`), the registry, one file or folder a model.

May import: compute, errors, notices.
"""

from dualweaver.backbones.base import Backbone, Forecast, ModuleBackbone
from dualweaver.backbones.registry import available_backbones, load_backbone, register_backbone

__all__ = ["Backbone", "Forecast", "ModuleBackbone", "available_backbones", "load_backbone", "register_backbone"]
