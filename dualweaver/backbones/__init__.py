"""Frozen univariate forecasters, each loadable by name."""

from dualweaver.backbones.base import (
    Backbone,
    Forecast,
    ModuleBackbone,
    available_backbones,
    load_backbone,
    register_backbone,
)

__all__ = ["Backbone", "Forecast", "ModuleBackbone", "available_backbones", "load_backbone", "register_backbone"]
