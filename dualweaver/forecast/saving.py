"""A fitted forecaster as tensors and plain JSON, and back."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from dualweaver._version import __version__
from dualweaver.backbones import Backbone
from dualweaver.backbones.precision import load_in_precision, precision_of
from dualweaver.compute.storage import ADAPTER, BACKBONE, CONFIG, read_folder, write_folder
from dualweaver.data.frames import Block, Layout
from dualweaver.errors import CheckpointError, SettingError
from dualweaver.forecast.calibration import LEVELS, Calibration
from dualweaver.forecast.labels import from_json, index_from_ticks, index_kind, table_to_json, ticks_of, to_json
from dualweaver.forecast.pipeline import Pipeline
from dualweaver.settings import FitSettings

__all__ = ["load_forecaster", "save_forecaster"]


def save_forecaster(forecaster: Any, folder: str | os.PathLike[str]) -> None:
    """Write everything that a forecast needs, except the weights of a frozen backbone."""
    pipeline: Pipeline = forecaster.pipeline_
    settings = forecaster.get_params(deep=False)
    settings["backbone"] = (
        pipeline.untouched.spec if isinstance(settings["backbone"], nn.Module) else settings["backbone"]
    )
    settings["freq"] = None if settings["freq"] is None else forecaster.layout_.freq
    trained = pipeline.backbone is not pipeline.untouched
    config = {
        "version": __version__,
        "settings": {name: to_json(name, value) for name, value in settings.items()},
        "layout": forecaster.layout_.to_dict(),
        "columns": [to_json("columns", name) for name in forecaster.columns_],
        "targets": pipeline.targets.tolist(),
        "context_length": pipeline.context_length,
        "adapter": {"name": forecaster.adapter_, "fine_tuned": forecaster.fine_tuned_},
        "backbone": {
            "name": pipeline.untouched.name,
            "checkpoint": pipeline.untouched.checkpoint,
            "revision": pipeline.untouched.revision,
            "sha256": pipeline.untouched.fingerprint(),
            "precision": precision_of(pipeline.untouched),
            "fine_tuned": trained,
        },
        "entities": [to_json("entity", tail.entity) for tail in forecaster.tails_],
        "index": index_kind(forecaster.tails_[0].index),
        "scores": table_to_json(forecaster.scores_),
        "history": table_to_json(forecaster.history_),
    }
    write_folder(folder, config, _tensors(forecaster), pipeline.backbone.state_dict() if trained else None)


def _tensors(forecaster: Any) -> dict[str, Tensor]:
    pipeline: Pipeline = forecaster.pipeline_
    assert pipeline.calibration is not None
    assert pipeline.untouched_calibration is not None
    arrays = {
        "scaler.mean": pipeline.scaler.mean_,
        "scaler.scale": pipeline.scaler.scale_,
        "scaler.var": pipeline.scaler.var_,
        "fallback": pipeline.fallback,
        "calibration": pipeline.calibration.offsets,
        "calibration.untouched": pipeline.untouched_calibration.offsets,
    }
    for position, tail in enumerate(forecaster.tails_):
        arrays[f"tail.{position}.values"], arrays[f"tail.{position}.observed"] = tail.values, tail.observed
        arrays[f"tail.{position}.index"] = ticks_of(tail.index)
    tensors = {f"adapter.{name}": value for name, value in pipeline.adapter.state_dict().items()}
    return tensors | {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}


def load_forecaster(cls: type[Any], folder: str | os.PathLike[str], backbone: str | nn.Module | None) -> Any:
    """A forecaster that `save_forecaster` wrote, after its backbone was recognised by its fingerprint."""
    config, tensors, weights = read_folder(folder)
    try:
        forecaster, parts = _describe(cls, config)
        _check_shapes(parts, tensors)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, CheckpointError):
            raise CheckpointError(f"{folder}: {error}") from error
        reason = f"no {error}" if isinstance(error, KeyError) else str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"{Path(folder) / CONFIG} does not describe a forecaster of this version of dualweaver ({reason})"
        ) from error
    if backbone is not None:
        forecaster.backbone = backbone
    untouched = _untouched(config["backbone"], forecaster, folder)
    inner = _fine_tuned(untouched, weights, folder) if config["backbone"]["fine_tuned"] else untouched
    if not inner.min_context <= parts["context_length"] <= inner.context_length:
        raise CheckpointError(
            f"{Path(folder) / CONFIG} has context_length {parts['context_length']}; its backbone takes "
            f"{inner.min_context} to {inner.context_length} steps"
        )
    _restore(forecaster, parts, config, tensors, inner, untouched, folder)
    return forecaster


def _describe(cls: type[Any], config: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """An estimator with its settings, and what the tensors must agree with; any wrong type raises."""
    forecaster = cls(**{name: from_json(value) for name, value in config["settings"].items()})
    columns = tuple(from_json(name) for name in config["columns"])
    targets, known = config["targets"], config["backbone"]
    if not columns or len(set(columns)) < len(columns):
        raise ValueError("its columns are not distinct labels")
    if not targets or any(type(at) is not int or not 0 <= at < len(columns) for at in targets):
        raise ValueError(f"its targets {str(targets)[:50]} are not positions of its {len(columns)} columns")
    if len(set(targets)) < len(targets):
        raise ValueError("its targets repeat")
    if type(config["context_length"]) is not int or not isinstance(known["sha256"], str):
        raise TypeError("its context_length is not a whole number, or the hash of its backbone is not text")
    if not isinstance(known["name"], str) or not isinstance(known["fine_tuned"], bool):
        raise TypeError("the name of its backbone is not text, or fine_tuned is not true or false")
    known["checkpoint"], known["revision"]  # present, whatever they hold
    if known.get("precision", "32") not in ("32", "bf16"):
        raise ValueError(f"the precision of its backbone is {str(known['precision'])[:50]!r}")
    kept = config["adapter"]
    settings = FitSettings.checked(forecaster)
    trained = settings.candidates(multivariate=True)
    if (kept["name"], kept["fine_tuned"]) not in [(one.adapter, one.trains_backbone) for one in trained]:
        raise ValueError(f"its adapter {str(kept)[:80]} is none that adapter={settings.adapter!r} trains")
    forecaster.adapter_, forecaster.fine_tuned_ = kept["name"], kept["fine_tuned"]
    entities = tuple(from_json(entity) for entity in config["entities"])
    if not entities:
        raise ValueError("it has no entities")
    return forecaster, {
        "settings": dataclasses.replace(settings, adapter=kept["name"]),
        "layout": Layout.from_dict(config["layout"]),
        "columns": columns,
        "targets": targets,
        "context_length": config["context_length"],
        "entities": entities,
        "scores": pd.DataFrame(config["scores"]),
        "history": pd.DataFrame(config["history"]),
    }


def _check_shapes(parts: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Sizes are checked against what is on disk before anything of that size is made."""
    channels, targets = len(parts["columns"]), len(parts["targets"])
    double, integer, boolean = torch.float64, torch.int64, torch.bool
    expected: dict[str, tuple[tuple[int | None, ...], torch.dtype]] = {
        "scaler.mean": ((channels,), double),
        "scaler.scale": ((channels,), double),
        "scaler.var": ((channels,), double),
        "fallback": ((targets,), boolean),
        "calibration": ((None, targets, len(LEVELS)), torch.float32),
        "calibration.untouched": ((None, targets, len(LEVELS)), torch.float32),
    }
    for position in range(len(parts["entities"])):
        expected[f"tail.{position}.values"] = ((None, channels), double)
        rows = tensors[name].shape[0] if (name := f"tail.{position}.values") in tensors else None
        expected[f"tail.{position}.observed"] = ((rows, channels), boolean)
        expected[f"tail.{position}.index"] = ((rows,), integer)
    for name, (shape, dtype) in expected.items():
        if name not in tensors:
            raise CheckpointError(f"{ADAPTER} lacks the tensor {name!r}, which {CONFIG} calls for")
        found = tensors[name]
        fits = len(found.shape) == len(shape) and all(
            have > 0 if want is None else have == want for have, want in zip(found.shape, shape, strict=True)
        )
        if not fits or found.dtype != dtype:
            wanted = ", ".join("1 or more" if size is None else str(size) for size in shape)
            raise CheckpointError(
                f"the tensor {name!r} in {ADAPTER} is {found.dtype} {list(found.shape)}; {CONFIG} calls for {dtype} "
                f"[{wanted}]"
            )
        if dtype.is_floating_point and not found.isfinite().all():
            raise CheckpointError(f"the tensor {name!r} in {ADAPTER} holds values that are not finite")
    if not (tensors["scaler.scale"] > 0).all():
        raise CheckpointError(f"the tensor 'scaler.scale' in {ADAPTER} is not positive")


def _untouched(known: dict[str, Any], forecaster: Any, folder: str | os.PathLike[str]) -> Backbone:
    if isinstance(forecaster.backbone, str) and forecaster.backbone == "module":
        raise CheckpointError(f"{folder} was fitted with a module of your own: pass it as backbone=")
    try:
        loaded = load_in_precision(forecaster.backbone, known.get("precision", "32"), forecaster.context_length)
    except SettingError as error:
        raise CheckpointError(
            f"{folder} was fitted with the backbone {known['name']!r}, which cannot be had here ({error}): pass it as "
            "backbone="
        ) from error
    if loaded.fingerprint() != known["sha256"]:
        raise CheckpointError(
            f"{folder} was fitted with another backbone: {known['name']} ({known['checkpoint']}, revision "
            f"{known['revision']}) with weights {known['sha256'][:12]}, but {loaded.spec} has "
            f"{loaded.fingerprint()[:12]}"
        )
    return loaded


def _fine_tuned(untouched: Backbone, weights: Mapping[str, Tensor] | None, folder: str | os.PathLike[str]) -> Backbone:
    file = Path(folder) / BACKBONE
    if weights is None:
        raise CheckpointError(f"{Path(folder) / CONFIG} does not list {BACKBONE}, which holds the fine-tuned weights")
    inner = copy.deepcopy(untouched)
    _refuse_other_types(inner, weights, file)
    try:
        inner.load_state_dict(dict(weights))
    except RuntimeError as error:
        raise CheckpointError(f"{file} does not fit the backbone {untouched.name!r} ({_reason(error)})") from error
    return inner.freeze()


def _refuse_other_types(module: nn.Module, weights: Mapping[str, Tensor], file: Path) -> None:
    """Loading would convert them in silence."""
    for name, expected in module.state_dict().items():
        if name in weights and weights[name].dtype != expected.dtype:
            raise CheckpointError(f"the tensor {name!r} in {file} is {weights[name].dtype}; expected {expected.dtype}")


def _restore(
    forecaster: Any,
    parts: dict[str, Any],
    config: dict[str, Any],
    tensors: Mapping[str, Tensor],
    inner: Backbone,
    untouched: Backbone,
    folder: str | os.PathLike[str],
) -> None:
    arrays = {name: tensor.numpy() for name, tensor in tensors.items() if not name.startswith("adapter.")}
    columns, targets = parts["columns"], parts["targets"]
    try:
        adapter = parts["settings"].make_adapter(len(columns), targets)
        weights = {name[8:]: value for name, value in tensors.items() if name.startswith("adapter.")}
        _refuse_other_types(adapter, weights, Path(folder) / ADAPTER)
        adapter.load_state_dict(weights)
        tails = tuple(
            Block(
                entity,
                index_from_ticks(arrays[f"tail.{position}.index"], config["index"]),
                arrays[f"tail.{position}.values"],
                arrays[f"tail.{position}.observed"],
            )
            for position, entity in enumerate(parts["entities"])
        )
        scores = parts["scores"].set_axis(
            pd.Index([columns[at] for at in targets], name="channel", tupleize_cols=False)
        )
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointError(f"{folder}: {CONFIG} and {ADAPTER} do not belong together ({_reason(error)})") from error
    scaler = StandardScaler()
    scaler.mean_, scaler.scale_, scaler.var_ = (arrays[f"scaler.{name}"] for name in ("mean", "scale", "var"))
    scaler.n_features_in_ = len(columns)
    forecaster.pipeline_ = Pipeline(
        inner,
        adapter.eval(),
        scaler,
        parts["context_length"],
        untouched,
        arrays["fallback"],
        Calibration(arrays["calibration"]),
        Calibration(arrays["calibration.untouched"]),
        forecaster.seed,
    )
    forecaster.layout_, forecaster.columns_ = parts["layout"], columns
    forecaster.targets_ = tuple(columns[at] for at in targets)
    forecaster.context_length_ = parts["context_length"]
    forecaster.n_features_in_ = len(columns)
    forecaster.tails_, forecaster.scores_, forecaster.history_ = tails, scores, parts["history"]


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__
