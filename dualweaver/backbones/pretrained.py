"""Loading a transformers model of ours from a directory or a hub, with errors that name the file or tensor.

`from_pretrained` does the work: hub names, revisions, dtypes and sharded files are the library's. Weights are read
from safetensors only and code that comes with a checkpoint is never run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from dualweaver.errors import CheckpointError

__all__ = ["load_pretrained"]

Model = TypeVar("Model", bound=PreTrainedModel)


def load_pretrained(
    model_class: type[Model], checkpoint: str, *, revision: str | None = None, dtype: torch.dtype | None = None
) -> Model:
    """Weights and configuration of `model_class` from a directory or a hub name.

    Args:
        model_class: one of our `PreTrainedModel` subclasses.
        checkpoint: a directory in hub layout (`config.json`, `model.safetensors` or its shards), or a hub name.
        revision: branch, tag or commit on the hub.
        dtype: of the weights, the checkpoint's own where None.

    Raises:
        CheckpointError: no such folder or hub name, another model's checkpoint, a damaged file, or a tensor that is
            missing or has another shape.
    """
    _check_directory(model_class, checkpoint)
    try:
        with _quiet():
            loaded: Any = model_class.from_pretrained(
                checkpoint,
                revision=revision or "main",
                dtype=dtype or "auto",
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # so that the report names them; refused below
                output_loading_info=True,
            )
            model, report = loaded
    except SafetensorError as error:
        raise CheckpointError(f"{checkpoint}: the safetensors file is damaged ({error})") from error
    except (OSError, KeyError, json.JSONDecodeError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"cannot load {checkpoint!r} ({first_line}); give a local directory that holds config.json and "
            "model.safetensors, or a hub name while the hub can be reached"
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise CheckpointError(f"{checkpoint}: tensor {missing[0]!r} is missing ({len(missing)} in all)")
    mismatched = sorted(report["mismatched_keys"])
    if mismatched:
        name, found, expected = mismatched[0]
        raise CheckpointError(
            f"{checkpoint}: tensor {name!r} has shape {list(found)}, the configuration asks for {list(expected)}"
        )
    return model


def _check_directory(model_class: type[PreTrainedModel], checkpoint: str) -> None:
    """Refuse another model's directory before its weights are read."""
    directory = Path(checkpoint)
    if not directory.is_dir():
        return
    config_file = directory / "config.json"
    if not config_file.is_file():
        raise CheckpointError(f"{directory}: config.json is missing")
    try:
        found = json.loads(config_file.read_text()).get("model_type")
    except (json.JSONDecodeError, AttributeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{config_file} is not a JSON object ({error})") from error
    expected = model_class.config_class.model_type  # type: ignore[union-attr]
    if found != expected:
        raise CheckpointError(f"{directory} holds a model of type {found!r}; expected {expected!r}")
    if not list(directory.glob("*.safetensors")):
        raise CheckpointError(f"{directory}: no *.safetensors file; other weight formats are not read")


@contextmanager
def _quiet() -> Iterator[None]:
    """No bar and no load report on the terminal: what matters in the report is raised as an error."""
    level, bar = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bar:
            transformers_logging.enable_progress_bar()
