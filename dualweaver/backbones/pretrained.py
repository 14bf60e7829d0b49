"""Backbones around a transformers model, ours or not, loaded from a directory or a hub; errors name the file or tensor.

`from_pretrained` does the work: hub names, revisions, dtypes and sharded files are the library's. Weights are read
from safetensors only, after their shapes were compared with the configuration, and code that comes with a checkpoint is
never run, nor downloaded.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from huggingface_hub import snapshot_download
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from dualweaver.backbones.base import Backbone
from dualweaver.backbones.headers import refuse_misfits
from dualweaver.errors import CheckpointError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["PretrainedBackbone", "load_pretrained"]

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
READ = (CONFIG, INDEX, "*.safetensors")

Model = TypeVar("Model", bound=PreTrainedModel)


class PretrainedBackbone(Backbone):
    """A backbone around a transformers model, which its constructor takes first and keeps as `model`.

    Attributes:
        renamed: see `load_pretrained`.
    """

    default_checkpoint: ClassVar[str]
    renamed: ClassVar[Mapping[str, str] | None] = None

    @classmethod
    @abstractmethod
    def model_class(cls) -> type[PreTrainedModel]:
        """The class of the model, imported when it is asked for."""

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: str | None,
        *,
        revision: str | None = None,
        context_length: int | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> Self:
        """Load weights from a directory or a hub name; `options` are those of the constructor."""
        checkpoint = checkpoint or cls.default_checkpoint
        model: Any = load_pretrained(cls.model_class(), checkpoint, revision=revision, dtype=dtype, renamed=cls.renamed)
        make: Any = cls  # each class has a constructor of its own
        return make(model, context_length=context_length, checkpoint=checkpoint, revision=revision, **options)


def load_pretrained(
    model_class: type[Model],
    checkpoint: str,
    *,
    revision: str | None = None,
    dtype: torch.dtype | None = None,
    renamed: Mapping[str, str] | None = None,
) -> Model:
    """Weights and configuration of `model_class` from a directory or a hub name.

    Args:
        model_class: a `PreTrainedModel`, ours or another package's.
        checkpoint: a directory in hub layout (`config.json`, `model.safetensors` or its shards), or a hub name.
        revision: branch, tag or commit on the hub.
        dtype: of the weights, the checkpoint's own where None.
        renamed: parts of tensor names in files, and what `model_class` calls them, where its library renames them.

    Raises:
        CheckpointError: no such folder or hub name, another model's checkpoint, a damaged file, or a tensor that is
            missing or has another shape.
    """
    directory = _directory(checkpoint, revision)
    config = _read_config(model_class, checkpoint, directory)
    refuse_misfits(
        checkpoint,
        config,
        lambda: model_class(model_class.config_class.from_dict(config)),  # type: ignore[union-attr]
        _weight_files(checkpoint, directory),
        renamed=renamed,
        tied=list(model_class._tied_weights_keys or ()),
    )
    try:
        with _quiet():
            return model_class.from_pretrained(
                directory,
                dtype=dtype or "auto",
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
            )
    except Exception as error:  # whatever the code of a model, which may be another package's, raises
        raise CheckpointError(f"cannot load {checkpoint!r} ({_reason(error)})") from error


def _directory(checkpoint: str, revision: str | None) -> Path:
    """Where the files are; those of a hub name are downloaded, unless they are there already. Code never is."""
    if Path(checkpoint).is_dir():
        return Path(checkpoint)
    try:
        with _quiet():
            return Path(
                snapshot_download(
                    checkpoint, revision=revision or "main", allow_patterns=list(READ), ignore_patterns=["*/*"]
                )
            )
    except (OSError, ValueError) as error:  # the hub's own errors are both
        raise CheckpointError(
            f"cannot load {checkpoint!r} ({_reason(error)}); give a local directory that holds config.json and "
            "model.safetensors, or a hub name while the hub can be reached"
        ) from error


def _read_config(model_class: type[PreTrainedModel], checkpoint: str, directory: Path) -> dict[str, Any]:
    """The configuration, unless it is another model's or asks for what is not done here."""
    file = directory / CONFIG
    if not file.is_file():
        raise CheckpointError(f"{checkpoint}: {CONFIG} is missing")
    config = _read_json(file)
    expected = model_class.config_class.model_type  # type: ignore[union-attr]
    if config.get("model_type") != expected:
        raise CheckpointError(f"{checkpoint} holds a model of type {config.get('model_type')!r}; expected {expected!r}")
    if "quantization_config" in config:
        raise CheckpointError(f"{checkpoint}: its weights are quantised, which is not supported")
    if (directory / "adapter_config.json").exists():  # would lead on to other folders, or to the hub
        raise CheckpointError(f"{checkpoint}: adapter_config.json makes it another library's adapter, not a model")
    return config


def _weight_files(checkpoint: str, directory: Path) -> list[Path]:
    if (directory / WEIGHTS).is_file():
        return [directory / WEIGHTS]
    if not (directory / INDEX).is_file():
        raise CheckpointError(f"{checkpoint}: neither {WEIGHTS} nor {INDEX} is there; other formats are not read")
    shards = _read_json(directory / INDEX).get("weight_map")
    if not isinstance(shards, dict):
        raise CheckpointError(f"{directory / INDEX} has no weight_map")
    for name in shards.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{directory / INDEX} lists {str(name)[:50]!r}, which is no file beside it")
    return [directory / name for name in sorted(set(shards.values()))]


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(type(content).__name__)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not a JSON object ({_reason(error)})") from error
    return content


def _reason(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


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
