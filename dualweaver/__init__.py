"""Multivariate forecasting with any frozen univariate time-series foundation model."""

from dualweaver._version import __version__
from dualweaver.backbones import load_backbone

__all__ = ["__version__", "load_backbone"]
