"""Modules by the names that they had before they were grouped, for one release, with a deprecation notice."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["MOVED", "find_moved_modules"]

MOVED = {
    "allocator": ("compute.allocator",),
    "cache": ("fit.cache",),
    "calibration": ("forecast.calibration",),
    "compilation": ("compute.compilation",),
    "effort": ("fit.effort",),
    "fit_windows": ("fit.windows",),
    "fitting": ("fit.fitting", "fit.selection"),
    "forecasting": ("forecast.blocks",),
    "influence": ("method.influence",),
    "interrupt": ("fit.interrupt",),
    "labels": ("forecast.labels",),
    "persistence": ("forecast.saving",),
    "pipeline": ("forecast.pipeline",),
    "plotting": ("evaluation.plots",),
    "precision": ("backbones.precision", "settings"),
    "resume": ("fit.resume",),
    "seeding": ("compute.seeding",),
    "shares": ("fit.selection",),
    "stages": ("fit.stages", "fit.reconstruction"),
    "storage": ("compute.storage",),
    "streaming": ("compute.streaming",),
    "training": ("fit.training", "fit.module", "fit.callbacks"),
    "weaver": ("method.weaver", "method.fusion", "method.context_filter"),
    "backbones.fracast_core": ("backbones.fracast.core",),
    "backbones.products": ("compute.products",),
    "backbones.recompute": ("compute.recompute",),
    "planning.commands": ("cli.planning",),
    "planning.limits": ("compute.limits",),
    "planning.planner": ("planning.plans", "compute.plan"),
}


class _Moved(ModuleType):
    """Hands on what is asked of it to where it is now."""

    def __getattr__(self, name: str) -> Any:
        for place in _places(self.__name__):
            module = importlib.import_module(place)
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname.removeprefix("dualweaver.") in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Moved(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        now = " and ".join(_places(module.__name__))
        warnings.warn(
            f"{module.__name__} is now {now}: the old name goes with the next release", DeprecationWarning, stacklevel=2
        )


def _places(name: str) -> list[str]:
    return [f"dualweaver.{place}" for place in MOVED[name.removeprefix("dualweaver.")]]


def find_moved_modules() -> None:
    """Let `import dualweaver.<old name>` work; asked last, so that nothing else costs more."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
