"""A fit that was killed goes on where it stood: `fit(df, resume="folder")` ends with the bits of an undisturbed one.

The folder holds

resume.json                        what the fit is: settings, columns, data, backbone; another fit is refused by name
<stage>.epoch-0003.<checksum>.pt   where training stood at the end of an epoch; the newest two
<stage>.done.<checksum>.pt         what a finished stage left: its course and the weights it keeps

Files are written aside and then renamed. The checksum, over the content and over what the fit is, tells a file that is
torn or came from another fit, which is passed over. They hold tensors and plain values and are read as nothing else, so
that nothing that is read can execute. A frozen backbone's weights are not among them.

A finished stage is never repeated. When all are finished, a second fit of the same data trains nothing and gives the
same bits; the folder can be removed at any time.

Only ends of epochs are kept: all randomness is a pure function of seed, epoch and batch, so that an epoch begun again
is the same epoch.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins import CheckpointIO
from sklearn.preprocessing import StandardScaler

from dualweaver._version import __version__
from dualweaver.backbones import Backbone
from dualweaver.compute.storage import replace_file
from dualweaver.data.windows import WindowDataset
from dualweaver.errors import CheckpointError
from dualweaver.notices import notify
from dualweaver.settings import FitSettings

__all__ = ["ResumeFolder", "SaveEpochs", "Stage", "describe_fit"]

MANIFEST = "resume.json"
ASIDE = ".writing"  # a name of its own, so that a process that was killed leaves one such file at most


def describe_fit(
    settings: FitSettings,
    backbone: Backbone,
    scaler: StandardScaler,
    targets: list[int],
    train: WindowDataset,
    validation: WindowDataset,
) -> dict[str, Any]:
    """All that decides on the bits of a fit, except the names of the columns, in the order of its telling."""
    digest = hashlib.sha256()
    for array in (train.values.numpy(), train.starts.numpy(), validation.starts.numpy(), scaler.mean_, scaler.scale_):
        digest.update(np.ascontiguousarray(array).data)
    return {
        "dualweaver": __version__,
        **settings.decisive(),
        "backbone": backbone.spec,
        "backbone weights": backbone.fingerprint()[:16],
        "targets": targets,
        "device": str(torch.accelerator.current_accelerator() or "cpu"),
        "rows": len(train.values),
        "data": digest.hexdigest()[:16],
    }


class ResumeFolder:
    """Where a fit keeps how far it has come.

    Args:
        path: a new or empty folder, or one that an earlier try of the same fit has left.
        columns: of the frame.
    """

    def __init__(self, path: str | os.PathLike[str], columns: list[str]) -> None:
        self.path, self.columns = Path(path), columns
        self.complained = False
        self.identity = b""

    def claim(self, described: Mapping[str, Any]) -> None:
        """Take the folder for the fit that `describe_fit` described.

        Raises:
            CheckpointError: it belongs to another fit or to something else, or cannot be written.
        """
        described = json.loads(json.dumps({"columns": self.columns, **described}, default=lambda number: number.item()))
        manifest = self.path / MANIFEST
        try:
            known = _read_manifest(manifest)
            if known is None and self.path.exists() and any(entry.name != ASIDE for entry in self.path.iterdir()):
                raise CheckpointError(f"{self.path} is not empty and holds no {MANIFEST}: choose another resume folder")
            for name, here in described.items() if known is not None else ():
                if (there := known and known.get(name)) != here:
                    raise CheckpointError(
                        f"resume folder {self.path} belongs to another fit: {name} {_short(there)} there, "
                        f"{_short(here)} here; choose another folder, or remove this one"
                    )
            self.path.mkdir(parents=True, exist_ok=True)
            # also where it is there already: a folder that cannot be written shows before any training
            replace_file(manifest, json.dumps(described, indent=2).encode() + b"\n", self.path / ASIDE)
        except OSError as error:
            raise CheckpointError(f"cannot use the resume folder {self.path}: {error.strerror or error}") from error
        self.identity = json.dumps(described, sort_keys=True).encode()

    def stage(self, name: str, *, weights: bool = True) -> Stage:
        """What is kept of one stage; `weights` says whether its result holds weights, or its course only."""
        return Stage(self, re.sub(r"[^a-z0-9]+", "-", name.lower()), weights)


class Stage(CheckpointIO):
    """What is kept of one stage of a fit, and how Lightning writes and reads it."""

    def __init__(self, folder: ResumeFolder, name: str, weights: bool) -> None:
        self.folder, self.name, self.weights = folder, name, weights

    def result(self) -> dict[str, Any] | None:
        """What `finish` kept, if the stage is finished."""
        file = self._intact("done")
        return None if file is None else self.load_checkpoint(file)

    def finish(self, result: Mapping[str, Any]) -> None:
        """Keep `result`, with its "weights" where they are wanted, in the place of the checkpoints."""
        if self._write("done", {**result, "weights": result["weights"] if self.weights else {}}):
            self._remove_epochs()

    def newest(self) -> Path | None:
        """The newest intact checkpoint."""
        return self._intact("epoch-*")

    def save_epoch(self, trainer: L.Trainer) -> None:
        trainer.save_checkpoint(self.folder.path / f"epoch-{trainer.current_epoch + 1:04d}")

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if self._write(Path(path).name, checkpoint):
            self._remove_epochs(before=_epoch(Path(path).name) - 1)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        content = self._read(Path(path))
        try:
            if content is None:
                raise ValueError("its checksum does not fit")
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, LookupError) as error:
            raise CheckpointError(
                f"{path} is no checkpoint of tensors and plain values ({str(error).splitlines()[0]}): remove it"
            ) from error

    def remove_checkpoint(self, path: Any) -> None:
        with contextlib.suppress(OSError):  # what cannot be removed harms nothing
            Path(path).unlink()

    def _intact(self, kind: str) -> Path | None:
        for file in self._files(kind):
            if self._read(file) is not None:
                return file
            notify(f"{file} is damaged, or belongs to another fit: passed over")
        return None

    def _files(self, kind: str) -> list[Path]:
        return sorted(self.folder.path.glob(f"{self.name}.{kind}.*.pt"), reverse=True)

    def _remove_epochs(self, before: float = float("inf")) -> None:
        for file in self._files("epoch-*"):
            if _epoch(file.name) < before:
                self.remove_checkpoint(file)

    def _read(self, file: Path) -> bytes | None:
        """The content of a file; None unless it is whole and belongs to this stage of this fit."""
        with contextlib.suppress(OSError):
            content = file.read_bytes()
            if file.name.split(".")[-2] == self._checksum(content):
                return content
        return None

    def _write(self, kind: str, state: Mapping[str, Any]) -> bool:
        """Whether it was written: training goes on without a checkpoint, and says so once."""
        buffer = io.BytesIO()
        torch.save(dict(state), buffer)
        content = buffer.getvalue()
        file = self.folder.path / f"{self.name}.{kind}.{self._checksum(content)}.pt"
        try:
            replace_file(file, content, self.folder.path / ASIDE)
        except OSError as error:
            if not self.folder.complained:
                notify(
                    f"cannot write to the resume folder {self.folder.path} ({error.strerror or error}): the fit goes "
                    "on, but resuming it would begin at the last checkpoint that was written"
                )
            self.folder.complained = True
            return False
        return True

    def _checksum(self, content: bytes) -> str:
        digest = hashlib.sha256(self.folder.identity + self.name.encode())
        digest.update(content)
        return digest.hexdigest()[:16]


class SaveEpochs(Checkpoint):
    """Keeps the end of every epoch but the last, which the stage's result follows at once, and one that was broken off.

    Lightning runs checkpoint callbacks after all others, so that what they have decided is in the checkpoint.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert trainer.max_epochs is not None
        if not trainer.should_stop and trainer.current_epoch + 1 < trainer.max_epochs:
            self.stage.save_epoch(trainer)


def _short(value: Any) -> str:
    return text if len(text := str(value)) <= 100 else f"{text[:70]} ... {text[-25:]}"


def _epoch(name: str) -> int:
    found = re.search(r"epoch-(\d+)", name)
    return int(found[1]) if found else 0


def _read_manifest(file: Path) -> dict[str, Any] | None:
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(known, dict):
            raise ValueError("not an object")
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({str(error).splitlines()[0]}): choose another resume folder, or remove this one"
        ) from error
    return known
