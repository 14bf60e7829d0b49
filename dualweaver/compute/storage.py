"""Saving a fitted forecaster: a folder of safetensors and JSON, written aside and then renamed.

config.json            settings, columns, layout, backbone with its fingerprint, checksums of the other files
adapter.safetensors    trained weights, scaling, calibration, the last rows of the data
backbone.safetensors   only where the backbone was fine-tuned

Nothing else in a folder is ever opened, and nothing that is read can execute.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as dump_tensors
from torch import Tensor

from dualweaver.errors import CheckpointError

__all__ = ["ADAPTER", "BACKBONE", "CONFIG", "FORMAT", "read_folder", "replace_file", "write_folder"]

FORMAT = 1
CONFIG = "config.json"
ADAPTER = "adapter.safetensors"
BACKBONE = "backbone.safetensors"
OURS = frozenset({CONFIG, ADAPTER, BACKBONE})

Tensors = Mapping[str, Tensor]


def write_folder(
    folder: str | os.PathLike[str], config: dict[str, Any], adapter: Tensors, backbone: Tensors | None = None
) -> None:
    """Write a folder whole or not at all; an earlier save at the same place stays until the new one is complete.

    Raises:
        CheckpointError: the place is taken by something else, or cannot be written.
    """
    files = {ADAPTER: dump_tensors(_plain(adapter))}
    if backbone is not None:
        files[BACKBONE] = dump_tensors(_plain(backbone))
    checksums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    described = {"format": FORMAT, **config, "files": checksums}
    files[CONFIG] = (json.dumps(described, indent=2, allow_nan=False) + "\n").encode()
    aside: Path | None = None
    try:
        target = Path(folder).resolve()  # through a link, so that the link stays
        _refuse_foreign(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        for name, content in files.items():
            _write(aside / name, content)
        aside.chmod(0o755)
        _flush_folder(aside)
        _swap(aside, target)
        _flush_folder(target.parent)
    except OSError as error:
        raise CheckpointError(f"cannot save to {folder}: {error.strerror or error}") from error
    finally:
        if aside is not None:
            _remove(aside)


def replace_file(file: Path, content: bytes, aside: Path) -> None:
    """Write a file whole or not at all: first as `aside` in the same folder, then renamed."""
    try:
        _write(aside, content)
        aside.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise
    _flush_folder(file.parent)


def read_folder(folder: str | os.PathLike[str]) -> tuple[dict[str, Any], Tensors, Tensors | None]:
    """The configuration and tensors of a saved folder, after all checks.

    Raises:
        CheckpointError: a file is missing, truncated, changed or foreign; it names the file.
    """
    source = _readable(Path(folder))
    if not source.is_dir():
        raise CheckpointError(f"{source} is not a folder; expected one that DualWeaver.save wrote")
    config = _read_config(source / CONFIG)
    if ADAPTER not in config["files"]:
        raise CheckpointError(f"{source / CONFIG} does not list {ADAPTER}")
    for name in config["files"]:
        if name not in (ADAPTER, BACKBONE):
            raise CheckpointError(f"{source / CONFIG} lists the foreign file {name!r}")
    tensors = {name: _read_tensors(source / name, digest) for name, digest in config["files"].items()}
    return config, tensors[ADAPTER], tensors.get(BACKBONE)


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing: {file.parent} is not a saved forecaster") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON ({error})") from error
    if not isinstance(config, dict) or not isinstance(config.get("files"), dict) or "format" not in config:
        raise CheckpointError(f"{file} was not written by DualWeaver.save")
    if config["format"] != FORMAT:
        raise CheckpointError(
            f"{file} has format {config['format']!r}; this version of dualweaver reads format {FORMAT}"
        )
    return config


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"it holds {name}, which is not a number")


def _read_tensors(file: Path, digest: str) -> Tensors:
    try:
        content = file.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror})") from error
    if hashlib.sha256(content).hexdigest() != digest:
        raise CheckpointError(f"{file} is truncated or was changed: its checksum is not the one in {CONFIG}")
    try:
        return load_tensors(content)
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{file} is not a safetensors file of numbers ({error})") from error


def _refuse_foreign(target: Path) -> None:
    """Only nothing, an empty folder or an earlier save may be replaced."""
    if not target.exists():
        return
    found = {entry.name for entry in target.iterdir()} if target.is_dir() else {target.name}
    if not target.is_dir() or (found and not _is_save(target)):
        raise CheckpointError(f"{target} exists and is not a saved forecaster: choose another folder or remove it")
    if found - OURS:
        raise CheckpointError(
            f"{target} holds {sorted(found - OURS)[0]!r}, which DualWeaver.save did not write: move it away, or choose "
            "another folder"
        )


def _is_save(target: Path) -> bool:
    try:
        config = json.loads((target / CONFIG).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return False
    return isinstance(config, dict) and isinstance(config.get("files"), dict) and ADAPTER in config["files"]


def _previous(target: Path) -> Path:
    return target.with_name(f".{target.name}.previous")


def _readable(target: Path) -> Path:
    """Where a save was killed between its two renames, the earlier one under its other name."""
    whole = target.resolve()
    return _previous(whole) if not target.exists() and _previous(whole).is_dir() else target


def _swap(aside: Path, target: Path) -> None:
    """Put a complete folder in the place of an earlier one, which comes back if that fails."""
    previous = _previous(target)
    if target.exists():
        _remove(previous)
        target.rename(previous)
    try:
        aside.rename(target)
    except OSError:
        with contextlib.suppress(OSError):
            previous.rename(target)
        raise
    _remove(previous)


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError):  # what is left behind is hidden, and harms nothing
        shutil.rmtree(folder, ignore_errors=True)


def _write(file: Path, content: bytes) -> None:
    with file.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _flush_folder(folder: Path) -> None:
    """Names reach the disk before anything that depends on them, where the system can promise that."""
    if os.name != "posix":
        return
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _plain(tensors: Tensors) -> dict[str, Tensor]:
    """Copies of their own: the format knows no tensors that share memory."""
    return {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
