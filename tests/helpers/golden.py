"""Recorded numbers of the reference implementations, and the comparison with them.

Each folder holds inputs and outputs; `name__f32` and `name__f64` are one output recorded in two precisions.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Literal

import pytest
import torch
from places import ROOT, SHARED
from safetensors.torch import load_file
from torch import Tensor

__all__ = ["MODES", "Mode", "assert_matches", "compared", "dtype_of", "folder", "load", "model_directory", "outputs"]

Mode = Literal["f32", "f64"]
MODES: tuple[Mode, Mode] = ("f64", "f32")

_PLACES = (SHARED / "golden", ROOT / "tests" / "golden")  # the whole recording, or the subset kept here

_FLOAT64 = 1e-10  # absolute
_FLOAT32 = 2e-5  # of the tensor's largest value
_FLOAT32_OF = {"flownet_time_embedding": 1e-4}  # sines of angles up to 1000
_RELATIVE = {"loss_pred96_edge_revin"}  # losses of 1e4, where the last digit of float64 is near 1e-10

_compared: dict[tuple[str, str, str], float] = {}


def compared() -> int:
    """Tensors that were compared so far; one recorded in two precisions counts twice."""
    return len(_compared)


def dtype_of(mode: Mode) -> torch.dtype:
    return torch.float64 if mode == "f64" else torch.float32


def folder(name: str) -> Path:
    """The folder of that name; skips the test where the recording does not hold it."""
    for place in _PLACES:
        if (place / name).is_dir():
            return place / name
    pytest.skip(f"no recorded numbers in a folder {name!r}")


def model_directory(name: str) -> str:
    """The weights that the numbers in a folder were recorded with."""
    path = folder(name) / "model"
    if not path.is_dir():
        pytest.skip(f"no recorded weights in the folder {name!r}")
    return str(path)


def load(name: str, file: str = "forward.safetensors") -> dict[str, Tensor]:
    """All tensors of a file; skips the test where the recording does not hold it."""
    path = folder(name) / file
    if not path.is_file():
        pytest.skip(f"no recorded numbers in {name}/{file}")
    return _read(path)


@lru_cache(maxsize=8)
def _read(path: Path) -> dict[str, Tensor]:
    return load_file(path)


def outputs(name: str, file: str, mode: Mode) -> set[str]:
    """Names of all outputs that a file holds in that precision."""
    ending = f"__{mode}"
    return {key.removesuffix(ending) for key in load(name, file) if key.endswith(ending)}


def assert_matches(name: str, ours: Tensor, folder: str, mode: Mode, file: str = "forward.safetensors") -> None:
    """Compare with the recorded output `name`; skips the test where the recording does not hold it."""
    expected = load(folder, file).get(f"{name}__{mode}")
    if expected is None:
        pytest.skip(f"{folder}/{file} does not hold {name} in {mode}")
    assert ours.shape == expected.shape, f"{name}: shape {list(ours.shape)}, recorded {list(expected.shape)}"
    assert ours.dtype == dtype_of(mode), f"{name}: {ours.dtype}"
    largest = expected.abs().max().item()
    if mode == "f64":
        allowed = _FLOAT64 * (largest if name in _RELATIVE else 1.0)
    else:
        allowed = _FLOAT32_OF.get(name, _FLOAT32) * largest
    error = (ours.detach() - expected.to(ours.dtype)).abs().max().item()
    _compared[f"{folder}/{file}", name, mode] = error
    assert error <= allowed, f"{name} ({mode}) is off by {error:.2e}; {allowed:.2e} is allowed"
