"""What is trained around a frozen model, behind one small interface (`Adapter`); the training loss is its `objective`.

May import: method, backbones, compute, errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dualweaver.adapters.adapts import AdaPTS
from dualweaver.adapters.base import Adapter
from dualweaver.adapters.plain import FineTune, Joint, ZeroShot
from dualweaver.adapters.woven import DualWeaverAdapter
from dualweaver.errors import SettingError

__all__ = ["ADAPTERS", "AdaPTS", "Adapter", "DualWeaverAdapter", "FineTune", "Joint", "ZeroShot", "make_adapter"]

ADAPTERS: dict[str, type[Adapter]] = {
    adapter.name: adapter for adapter in (DualWeaverAdapter, AdaPTS, FineTune, Joint, ZeroShot)
}


def make_adapter(name: str, channels: int, targets: Sequence[int], **settings: Any) -> Adapter:
    """An adapter by name; `settings` go to its constructor."""
    if name not in ADAPTERS:
        raise SettingError(f"adapter={name!r}: expected one of {', '.join(sorted(ADAPTERS))}")
    return ADAPTERS[name](channels, targets, **settings)
