"""Multivariate forecasting with any frozen univariate time-series foundation model."""

from dualweaver._version import __version__
from dualweaver.backbones import load_backbone
from dualweaver.errors import DualWeaverError
from dualweaver.forecaster import DualWeaver

__all__ = ["DualWeaver", "DualWeaverError", "__version__", "load_backbone"]
