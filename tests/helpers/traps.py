"""Files that would run something if they were unpickled, and files that announce what they do not hold."""

from __future__ import annotations

import json
import pickle
import struct
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from toys import refusal


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (Path.touch, (self.file,))


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def traps(sprung: Path, folder: Path) -> list[bytes]:
    """The ways in which such a thing comes: a bare pickle, and what `torch.save` makes of it, old and new."""
    found = [pickle.dumps(Trap(sprung), protocol=protocol) for protocol in (0, 2, 4)]
    for new in (True, False):
        torch.save({"state_dict": Trap(sprung)}, folder / "trap", _use_new_zipfile_serialization=new)
        found.append((folder / "trap").read_bytes())
    (folder / "trap").unlink()
    return found


class Largest(TorchDispatchMode):
    """The most elements of any tensor that takes memory."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        out = function(*arguments, **(options or {}))
        if isinstance(out, torch.Tensor) and out.device.type != "meta":
            self.elements = max(self.elements, out.numel())
        return out


def cheap_refusal(call: Any, *arguments: Any) -> str:
    began = time.perf_counter()
    with Largest() as largest:
        message = refusal(call, *arguments)
    assert largest.elements < 10**6
    assert time.perf_counter() - began < 5
    return message


def announcing(header: dict[str, Any], length: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(64)


HEADERS = {
    "a head of 10**15 bytes": announcing({}, 10**15),
    "a head beyond 2**63": announcing({}, 2**64 - 1),
    "a tensor of 10**15 bytes": announcing(
        {"x": {"dtype": "F32", "shape": [25 * 10**13], "data_offsets": [0, 10**15]}}
    ),
    "a shape beyond its bytes": announcing({"x": {"dtype": "F32", "shape": [10**15], "data_offsets": [0, 64]}}),
    "a shape that overflows": announcing({"x": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 64]}}),
    "no head": b"",
}
