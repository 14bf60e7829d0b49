"""What a checkpoint's files announce, compared with what its configuration asks for, before either is made.

A safetensors file tells names, types and shapes in its head; the model that the configuration describes is built
without memory. So a configuration of an absurd size, or one that the file does not belong to, costs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from dualweaver.errors import CheckpointError

__all__ = ["refuse_misfits"]

FLOATS = ("F16", "BF16", "F32", "F64")
_DEPTHS = re.compile("layers|levels|depth|stages")  # settings that are counted up one by one when a model is built


def refuse_misfits(
    source: str | Path,
    settings: Mapping[str, Any],
    build: Callable[[], nn.Module],
    files: Sequence[Path],
    *,
    renamed: Mapping[str, str] | None = None,
    tied: Collection[str] = (),
) -> None:
    """Raise a CheckpointError unless the files hold every tensor of the model that `build` makes, in its shape.

    Args:
        source: the checkpoint, as the user named it.
        settings: those that `build` reads.
        build: makes the model, on whatever device is the default.
        files: safetensors, which together hold the weights.
        renamed: parts of tensor names in files, and what the model calls them now.
        tied: tensors that files leave out, since they are the same as others.
    """
    found: dict[str, tuple[str, list[int]]] = {}
    for file in files:
        for name, announced in _header(file).items():
            for old, new in (renamed or {}).items():
                name = name.replace(old, new)
            found[name] = announced
    for name, value in settings.items():
        # every layer has a tensor of its own; to build more of them would take long even without memory
        if isinstance(value, int) and _DEPTHS.search(name) and not 0 <= value <= len(found):
            raise CheckpointError(f"{source}: {name}={value} in the configuration, but there are {len(found)} tensors")
    try:
        with torch.device("meta"):
            expected = build().state_dict()
    except CheckpointError:
        raise
    except Exception as error:  # whatever the code of a model, which may be another package's, raises
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"{source}: no model can be built from its configuration ({reason})") from error
    missing = sorted(expected.keys() - found.keys() - set(tied))
    if missing:
        raise CheckpointError(f"{source}: tensor {missing[0]!r} is missing ({len(missing)} in all)")
    for name in sorted(found.keys() - expected.keys()):
        part = name[: max((match.end() for match in re.finditer(r"\.\d+\.", name)), default=0)]
        if not any(known.startswith(part) for known in expected):  # other models may keep constants beside the weights
            raise CheckpointError(f"{source}: tensor {name!r} is in a layer that the configuration does not ask for")
    for name in expected.keys() & found.keys():
        tensor = expected[name]
        dtype, shape = found[name]
        if shape != list(tensor.shape):
            raise CheckpointError(
                f"{source}: tensor {name!r} has shape {shape}, the configuration asks for {list(tensor.shape)}"
            )
        if tensor.is_floating_point() and dtype not in FLOATS:
            raise CheckpointError(f"{source}: tensor {name!r} holds {dtype}; expected one of {', '.join(FLOATS)}")


def _header(file: Path) -> dict[str, tuple[str, list[int]]]:
    """Type and shape of every tensor in a file, of which nothing else is read."""
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {name: (part.get_dtype(), list(part.get_shape())) for name, part in slices.items()}
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing") from error
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file} is damaged, or no safetensors file ({error})") from error
