"""Saving a fitted forecaster: a folder of safetensors and JSON, written aside and then renamed.

config.json            settings, columns, layout, backbone with its fingerprint, checksums of the other files
adapter.safetensors    trained weights, scaling, calibration, the last rows of the data
backbone.safetensors   only where the backbone was fine-tuned
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as dump_tensors

from dualweaver.errors import CheckpointError

__all__ = ["FORMAT", "read_folder", "write_folder"]

FORMAT = 1
CONFIG = "config.json"
ADAPTER = "adapter.safetensors"
BACKBONE = "backbone.safetensors"

Tensors = Mapping[str, npt.NDArray[Any]]


def write_folder(
    folder: str | os.PathLike[str], config: dict[str, Any], adapter: Tensors, backbone: Tensors | None = None
) -> None:
    """Write a folder whole or not at all; an earlier save at the same place stays until the new one is complete.

    Raises:
        CheckpointError: the place is taken by something else, or cannot be written.
    """
    target = Path(folder)
    if target.exists() and not _replaceable(target):
        raise CheckpointError(f"{target} exists and is not a saved forecaster; choose another folder or remove it")
    files = {ADAPTER: dump_tensors(_plain(adapter))}
    if backbone is not None:
        files[BACKBONE] = dump_tensors(_plain(backbone))
    described = {
        "format": FORMAT,
        **config,
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
    }
    files[CONFIG] = (json.dumps(described, indent=2) + "\n").encode()
    aside: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        for name, content in files.items():
            _write(aside / name, content)
        aside.chmod(0o755)
        _swap(aside, target)
    except OSError as error:
        raise CheckpointError(f"cannot save to {target}: {error.strerror or error}") from error
    finally:
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)


def read_folder(folder: str | os.PathLike[str]) -> tuple[dict[str, Any], Tensors, Tensors | None]:
    """The configuration and tensors of a saved folder, after all checks.

    Raises:
        CheckpointError: a file is missing, truncated, changed or foreign; it names the file.
    """
    source = _readable(Path(folder))
    if not source.is_dir():
        raise CheckpointError(f"{source} is not a folder; expected one that DualWeaver.save wrote")
    config_file = source / CONFIG
    try:
        config = json.loads(config_file.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"{config_file} is missing; {source} is not a saved forecaster") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{config_file} cannot be read as JSON ({error})") from error
    if not isinstance(config, dict) or not isinstance(config.get("files"), dict) or "format" not in config:
        raise CheckpointError(f"{config_file} was not written by DualWeaver.save")
    if config["format"] != FORMAT:
        raise CheckpointError(f"{config_file} has format {config['format']!r}; this version reads format {FORMAT}")
    tensors = {name: _read_tensors(source / name, digest) for name, digest in config["files"].items()}
    if ADAPTER not in tensors:
        raise CheckpointError(f"{config_file} does not list {ADAPTER}")
    return config, tensors[ADAPTER], tensors.get(BACKBONE)


def _read_tensors(file: Path, digest: str) -> Tensors:
    if file.name not in (ADAPTER, BACKBONE):
        raise CheckpointError(f"{file.parent / CONFIG} lists the foreign file {file.name!r}")
    try:
        content = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror})") from error
    if hashlib.sha256(content).hexdigest() != digest:
        raise CheckpointError(f"{file} is truncated or was changed: its checksum is not the one in {CONFIG}")
    try:
        return load_tensors(content)
    except SafetensorError as error:
        raise CheckpointError(f"{file} is not a safetensors file ({error})") from error


def _replaceable(target: Path) -> bool:
    """An empty folder, or an earlier save."""
    return target.is_dir() and (not any(target.iterdir()) or (target / CONFIG).is_file())


def _previous(target: Path) -> Path:
    return target.with_name(f".{target.name}.previous")


def _readable(target: Path) -> Path:
    """Where a save was interrupted between its two renames, the earlier one under its other name."""
    return _previous(target) if not target.exists() and _previous(target).is_dir() else target


def _swap(aside: Path, target: Path) -> None:
    previous = _previous(target)
    if target.exists():
        shutil.rmtree(previous, ignore_errors=True)
        target.rename(previous)
    aside.rename(target)
    shutil.rmtree(previous, ignore_errors=True)


def _write(file: Path, content: bytes) -> None:
    with file.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _plain(tensors: Tensors) -> dict[str, npt.NDArray[Any]]:
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
