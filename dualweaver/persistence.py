"""A fitted forecaster as tensors and plain JSON, and back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.preprocessing import StandardScaler
from torch import nn

from dualweaver._version import __version__
from dualweaver.backbones import Backbone, load_backbone
from dualweaver.calibration import Calibration
from dualweaver.data.frames import Block, Layout
from dualweaver.errors import CheckpointError
from dualweaver.fitting import FitSettings
from dualweaver.pipeline import Pipeline
from dualweaver.storage import read_folder, write_folder

__all__ = ["load_forecaster", "save_forecaster"]


def save_forecaster(forecaster: Any, folder: str | os.PathLike[str]) -> None:
    """Write everything that a forecast needs, except the weights of a frozen backbone."""
    pipeline: Pipeline = forecaster.pipeline_
    settings = forecaster.get_params(deep=False)
    own_module = isinstance(settings["backbone"], nn.Module)
    settings["backbone"] = pipeline.backbone.spec if own_module else settings["backbone"]
    trained = FitSettings.checked(forecaster).trains_backbone
    tensors: dict[str, Any] = {
        f"adapter.{name}": value.detach().cpu().numpy() for name, value in pipeline.adapter.state_dict().items()
    }
    tensors["scaler.mean"], tensors["scaler.scale"] = pipeline.scaler.mean_, pipeline.scaler.scale_
    tensors["scaler.var"] = pipeline.scaler.var_
    tensors["fallback"] = pipeline.fallback
    assert pipeline.calibration is not None
    tensors["calibration"] = pipeline.calibration.offsets
    for position, tail in enumerate(forecaster.tails_):
        tensors[f"tail.{position}.values"], tensors[f"tail.{position}.observed"] = tail.values, tail.observed
        tensors[f"tail.{position}.index"] = _ticks(tail.index)
    config = {
        "version": __version__,
        "settings": {name: _jsonable(name, value) for name, value in settings.items()},
        "layout": forecaster.layout_.to_dict(),
        "columns": [_jsonable("columns", name) for name in forecaster.columns_],
        "targets": pipeline.targets.tolist(),
        "context_length": pipeline.context_length,
        "backbone": {
            "name": pipeline.backbone.name,
            "checkpoint": pipeline.backbone.checkpoint,
            "revision": pipeline.backbone.revision,
            "sha256": pipeline.backbone.fingerprint(),
            "fine_tuned": trained,
        },
        "entities": [_jsonable("entity", tail.entity) for tail in forecaster.tails_],
        "index": _index_kind(forecaster.tails_[0].index),
        "scores": forecaster.scores_.reset_index(drop=True).to_dict(orient="list"),
        "history": forecaster.history_.astype(object).where(forecaster.history_.notna(), None).to_dict(orient="list"),
    }
    weights = None
    if trained:
        weights = {name: value.detach().cpu().numpy() for name, value in pipeline.backbone.state_dict().items()}
    write_folder(folder, config, tensors, weights)


def load_forecaster(cls: type[Any], folder: str | os.PathLike[str], backbone: str | nn.Module | None) -> Any:
    """A forecaster that `save_forecaster` wrote, after its backbone was recognised by its fingerprint."""
    config, tensors, weights = read_folder(folder)
    try:
        settings = {name: _from_json(value) for name, value in config["settings"].items()}
        forecaster = cls(**settings)
        known = config["backbone"]
        loaded = _backbone(known, settings, backbone, weights, folder)
        columns = tuple(_from_json(name) for name in config["columns"])
        targets = config["targets"]
        adapter = FitSettings.checked(forecaster).make_adapter(len(columns), targets)
        adapter.load_state_dict(
            {name[8:]: torch.from_numpy(value) for name, value in tensors.items() if name.startswith("adapter.")}
        )
        scaler = StandardScaler()
        scaler.mean_, scaler.scale_, scaler.var_ = (tensors[f"scaler.{name}"] for name in ("mean", "scale", "var"))
        scaler.n_features_in_ = len(columns)
        forecaster.pipeline_ = Pipeline(
            loaded,
            adapter.eval(),
            scaler,
            config["context_length"],
            tensors["fallback"],
            Calibration(tensors["calibration"]),
            forecaster.seed,
        )
        forecaster.layout_ = Layout.from_dict(config["layout"])
        forecaster.columns_ = columns
        forecaster.targets_ = tuple(columns[position] for position in targets)
        forecaster.context_length_ = config["context_length"]
        forecaster.n_features_in_ = len(columns)
        forecaster.tails_ = tuple(
            Block(
                _from_json(entity),
                _index(tensors[f"tail.{position}.index"], config["index"]),
                tensors[f"tail.{position}.values"],
                tensors[f"tail.{position}.observed"],
            )
            for position, entity in enumerate(config["entities"])
        )
        names = pd.Index(forecaster.targets_, name="channel", tupleize_cols=False)
        forecaster.scores_ = pd.DataFrame(config["scores"], index=names)
        forecaster.history_ = pd.DataFrame(config["history"])
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{Path(folder) / 'config.json'} does not describe a forecaster of this version ({first_line})"
        ) from error
    return forecaster


def _backbone(
    known: dict[str, Any],
    settings: dict[str, Any],
    given: str | nn.Module | None,
    weights: Any,
    folder: str | os.PathLike[str],
) -> Backbone:
    if given is None and known["name"] == "module":
        raise CheckpointError(f"{folder} was fitted with a module of your own: pass it as backbone=")
    loaded = load_backbone(given or settings["backbone"], context_length=settings["context_length"])
    if known["fine_tuned"]:
        if weights is None:
            raise CheckpointError(f"{Path(folder) / 'backbone.safetensors'} is missing")
        loaded.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in weights.items()})
    if loaded.fingerprint() != known["sha256"]:
        raise CheckpointError(
            f"{folder} was fitted with another backbone: {known['name']} ({known['checkpoint']}) with weights "
            f"{known['sha256'][:12]}, but {loaded.spec} has {loaded.fingerprint()[:12]}"
        )
    return loaded


def _ticks(index: pd.Index) -> Any:
    """An index as whole numbers: ticks of its unit, ordinals of its period, or its own."""
    return np.asarray(index.asi8 if isinstance(index, pd.DatetimeIndex | pd.PeriodIndex) else index, dtype=np.int64)


def _index_kind(index: pd.Index) -> dict[str, Any]:
    kind: dict[str, Any] = {"name": _jsonable("index name", index.name)}
    if isinstance(index, pd.DatetimeIndex):
        return kind | {"kind": "datetime", "unit": index.unit, "tz": None if index.tz is None else str(index.tz)}
    if isinstance(index, pd.PeriodIndex):
        return kind | {"kind": "period", "freq": index.freqstr}
    return kind | {"kind": "integer"}


def _index(ticks: Any, kind: dict[str, Any]) -> pd.Index:
    name = _from_json(kind["name"])
    if kind["kind"] == "datetime":
        stamps = pd.DatetimeIndex(ticks.view(f"datetime64[{kind['unit']}]"), name=name)
        return stamps if kind["tz"] is None else stamps.tz_localize("UTC").tz_convert(kind["tz"])
    if kind["kind"] == "period":
        return pd.PeriodIndex.from_ordinals(ticks, freq=kind["freq"], name=name)  # type: ignore[attr-defined]
    if len(ticks) > 1:  # a regular grid: a range again
        return pd.RangeIndex(ticks[0], ticks[-1] + 1, ticks[1] - ticks[0], name=name)
    return pd.Index(ticks, name=name)


def _jsonable(name: str, value: Any) -> Any:
    """Plain JSON for settings and labels; tuples are kept apart from lists."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tuple):
        return {"tuple": [_jsonable(name, part) for part in value]}
    if isinstance(value, list):
        return [_jsonable(name, part) for part in value]
    if isinstance(value, pd.Timestamp):
        return {"stamp": value.isoformat()}
    if isinstance(value, pd.offsets.BaseOffset):
        return value.freqstr
    raise CheckpointError(f"{name}={value!r} cannot be saved; use text or numbers")


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        if "tuple" in value:
            return tuple(_from_json(part) for part in value["tuple"])
        return pd.Timestamp(value["stamp"])
    return [_from_json(part) for part in value] if isinstance(value, list) else value
