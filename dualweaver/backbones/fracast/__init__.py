"""Fracast-0: the package's weights, a forward pass of our own that has gradients."""

from dualweaver.backbones.fracast.core import FracastConfig, FracastModel
from dualweaver.backbones.fracast.model import FracastBackbone

__all__ = ["FracastBackbone", "FracastConfig", "FracastModel"]
