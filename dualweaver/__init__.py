"""Multivariate forecasting with any frozen univariate time-series foundation model."""

from typing import TYPE_CHECKING, Any

from dualweaver._moved import find_moved_modules
from dualweaver._version import __version__
from dualweaver.backbones import load_backbone
from dualweaver.errors import DualWeaverError
from dualweaver.forecaster import DualWeaver

if TYPE_CHECKING:
    from dualweaver.planning.profiling import profile
    from dualweaver.planning.search import plan

__all__ = ["DualWeaver", "DualWeaverError", "__version__", "load_backbone", "plan", "profile"]

find_moved_modules()


def __getattr__(name: str) -> Any:
    """What only some need is imported when it is asked for."""
    if name == "profile":
        from dualweaver.planning.profiling import profile

        return profile
    if name == "plan":
        from dualweaver.planning.search import plan

        return plan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
