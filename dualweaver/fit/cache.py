"""What the untouched model makes of a window, kept on disk for later fits.

Zero-shot forecasts of validation windows and the untouched model's losses on training windows depend on data and frozen
weights alone. Where the environment variable DUALWEAVER_CACHE names a folder, they are kept there, one file a key:

<key>.<checksum>.safetensors   the key is a SHA-256 over data, weights and settings, the checksum one over the file

Files are written aside and then renamed, and mapped into memory when read. One that is damaged is passed over, and what
it held is computed again. Nothing is removed by itself; the folder can be, at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as dump_tensors
from torch import Tensor

from dualweaver._version import __version__
from dualweaver.backbones import Backbone, ModuleBackbone
from dualweaver.compute.storage import replace_file
from dualweaver.data.windows import WindowDataset
from dualweaver.notices import notify

__all__ = ["VARIABLE", "Kept", "kept_for", "remembered"]

VARIABLE = "DUALWEAVER_CACHE"
PIECE = 2**20  # bytes that are hashed at once

Tensors = dict[str, Tensor]


class Kept:
    """The tensors under one key; `read` gives None and `write` does nothing where no folder is named."""

    def __init__(self, folder: Path | None, key: str = "") -> None:
        self.folder, self.key = folder, key

    def read(self) -> Tensors | None:
        for file in self._files():
            with contextlib.suppress(OSError, SafetensorError, ValueError):
                if file.name.split(".")[-2] == _checksum(file):
                    return load_file(file)
            notify(f"{file} is damaged: what it held is computed again")
        return None

    def write(self, tensors: Tensors) -> None:
        if self.folder is None:
            return
        content = dump_tensors({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
        earlier, file = self._files(), self._named(hashlib.sha256(content).hexdigest()[:16])
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_file(file, content, self.folder / f"{file.name}.{os.getpid()}.writing")
            for old in set(earlier) - {file}:
                old.unlink(missing_ok=True)
        except OSError as error:
            notify(
                f"cannot write to the cache {self.folder} ({error.strerror or error}): nothing is kept for later fits"
            )

    def _files(self) -> list[Path]:
        return [] if self.folder is None else sorted(self.folder.glob(self._named("*").name))

    def _named(self, checksum: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{self.key}.{checksum}.safetensors"


def kept_for(backbone: Backbone, windows: WindowDataset, *settings: object) -> Kept:
    """What is kept for these windows, weights and settings (plain values, all that the result depends on).

    Nothing is kept for a module of one's own: what it computes is more than its weights.
    """
    folder = os.environ.get(VARIABLE)
    if not folder or isinstance(backbone, ModuleBackbone):
        return Kept(None)
    device = next(backbone.parameters(), torch.zeros(())).device.type
    described = (__version__, torch.__version__, device, _describe(backbone), windows.length, settings)
    digest = hashlib.sha256(repr(described).encode())
    for array in (windows.values, windows.starts):
        digest.update(repr(tuple(array.shape)).encode())
        digest.update(array.contiguous().numpy().data)
    return Kept(Path(folder).expanduser(), digest.hexdigest()[:32])


def _describe(backbone: Backbone) -> tuple[object, ...]:
    """Weights, configuration and options."""
    options = {name: value for name, value in vars(backbone).items() if isinstance(value, int | float | str | tuple)}
    config = getattr(getattr(backbone, "model", None), "config", None)
    return backbone.fingerprint(), type(backbone).__qualname__, repr(config), sorted(options.items())


def remembered(kept: Kept, compute: Callable[[], Tensors]) -> Tensors:
    """What is kept, or computed now and kept from now on."""
    known = kept.read()
    if known is None:
        kept.write(known := compute())
    return known


def _checksum(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while piece := stream.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()[:16]
