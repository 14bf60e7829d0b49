"""Training by the published protocol, one YAML file a data set.

    python experiments/train.py fit --config experiments/configs/etth1.yaml
    python experiments/train.py fit --config experiments/configs/etth1.yaml --model.adapter adapts --model.horizon 192
    python experiments/train.py fit --config CONFIG --ckpt_path runs/version_0/checkpoints/last.ckpt
    python experiments/train.py test --config CONFIG --ckpt_path runs/version_0/checkpoints/best.ckpt

`fit` trains on the train rows and selects on the validation rows; with a checkpoint it goes on from there. `test`
scores the test rows. Later files override earlier ones, options override files; `fit --help` lists all of them. Weights
are those of a hub, unless an option or an environment variable (DUALWEAVER_TTM, DUALWEAVER_TIMER, ...) names a folder.
At its end `fit` chooses, on validation rows, with which share of what the default adapter's filter learned the best
checkpoint forecasts; until then it is half. (`DualWeaver.fit` chooses likewise, but of the last epoch: the best one is
the protocol's.)
Logs are CSV files; `--trainer.logger TensorBoardLogger --trainer.logger.save_dir runs` takes TensorBoard, if installed.

The paper's protocol goes on top of any data set; `sft.yaml` is its first stage, whose checkpoint the second one adapts:

    cd experiments/configs
    python ../train.py fit --config etth1.yaml --config paper/timer.yaml --config paper/sft.yaml
    python ../train.py fit --config etth1.yaml --config paper/timer.yaml \\
        --model.fine_tuned runs/version_0/checkpoints/best.ckpt --model.horizon 720
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanAbsoluteError, MeanSquaredError

from dualweaver import DualWeaver
from dualweaver.adapters import AdaPTS, DualWeaverAdapter, ZeroShot
from dualweaver.backbones.precision import load_in_precision
from dualweaver.compute.compilation import compiled
from dualweaver.data.catalogue import describe_dataset, load_dataset
from dualweaver.data.files import read_file, write_aside
from dualweaver.data.module import WindowDataModule
from dualweaver.data.splits import protocol_segments
from dualweaver.data.windows import WindowDataset, whole_batch
from dualweaver.errors import DualWeaverError, SettingError
from dualweaver.fit.module import AdaptationModule, TrainingSettings
from dualweaver.fit.reconstruction import fit_reconstruction
from dualweaver.fit.selection import choose_share
from dualweaver.fit.stages import SERIES_PER_BATCH
from dualweaver.method import FILTER_STRENGTH
from dualweaver.settings import FitSettings

__all__ = ["Experiment", "ProtocolData", "main"]

os.environ.setdefault("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")  # checkpoints hold tensors and plain values


class Experiment(AdaptationModule):
    """An adapter around a frozen backbone.

    Args:
        channels: of the data; filled in.
        backbone: a registered name.
        weights: folder or hub name of its checkpoint; where None, what DUALWEAVER_<BACKBONE> names, or its default one.
        fine_tuned: checkpoint of a fine-tuning whose backbone is adapted.
        horizon, context_length, adapter, fusion, objective, context_filter, regularisation, channel_sample, compile,
            precision: as for `dualweaver.DualWeaver`.
        learning_rate, weight_decay, betas: of AdamW.
        max_epochs, seed: filled in.
    """

    def __init__(
        self,
        channels: int,
        *,
        backbone: str = "fracast",
        weights: str | None = None,
        fine_tuned: str | None = None,
        horizon: int = 96,
        context_length: int | None = None,
        adapter: Literal["dualweaver", "adapts", "fine-tune", "zero-shot"] = "dualweaver",
        fusion: Literal["mlp", "cnn"] = "mlp",
        objective: Literal["reconstruction", "paper"] = "reconstruction",
        context_filter: bool = True,
        regularisation: float = 0.0,
        channel_sample: int | None = None,
        compile: bool = False,
        precision: Literal["32", "bf16"] = "32",
        learning_rate: float = 1e-2,
        weight_decay: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        max_epochs: int = 10,
        seed: int = 0,
    ) -> None:
        settings = FitSettings.checked(
            DualWeaver(
                horizon=horizon,
                context_length=context_length,
                adapter=adapter,
                fusion=fusion,
                objective=objective,
                context_filter=context_filter,
                regularisation=regularisation,
                channel_sample=channel_sample,
                compile=compile,
                precision=precision,
                learning_rate=learning_rate,
                max_epochs=max_epochs,
                seed=seed,
            )
        )
        weights = weights or os.environ.get(f"DUALWEAVER_{backbone.upper()}")
        spec = backbone if weights is None else f"{backbone}:{weights}"
        loaded = load_in_precision(spec, settings.loaded_precision, context_length)
        if fine_tuned is not None:
            state = torch.load(fine_tuned, map_location="cpu", weights_only=True)["state_dict"]
            prefix = "backbone."
            loaded.load_state_dict({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})
        super().__init__(
            settings.make_adapter(channels, range(channels)),
            loaded,
            TrainingSettings(max_epochs, learning_rate, weight_decay, betas, seed=seed),
            context_length=context_length or loaded.context_length,
            horizon=horizon,
            windows=0,
        )
        self.compiles = settings.compile and not self.adapter.trains_backbone
        self.test_mse, self.test_mae = MeanSquaredError(), MeanAbsoluteError()
        self._while_training = ExitStack()

    @property
    def future(self) -> int:
        """Steps after the context that a training window must hold."""
        return self.adapter.future_steps(self.backbone, self.horizon)

    def setup(self, stage: str) -> None:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        windows = len(data.train_windows) if self.adapter.needs_reference else 0
        self.references = torch.full((windows, len(self.adapter.targets)), torch.nan, device=self.device)
        if stage != "fit":
            return
        if self.adapter.name == ZeroShot.name:
            raise SettingError("adapter='zero-shot' has nothing to fit: validate or test it")
        if isinstance(self.adapter, AdaPTS):  # a function of data and seed: when resumed, a checkpoint overwrites it
            unseen = data.validation_windows.values[self.context_length :]
            fit_reconstruction(self.adapter, data.train_windows.values, unseen, self.settings.seed)
        if self.adapter.trains_backbone:
            self._while_training.enter_context(self.backbone.unfrozen())
        elif self.compiles:
            self._while_training.enter_context(compiled(self.backbone))

    def on_fit_start(self) -> None:
        if isinstance(self.adapter, DualWeaverAdapter) and self.adapter.weaver.context_filter is not None:
            self.adapter.weaver.context_filter.strength.fill_(FILTER_STRENGTH)  # a best checkpoint holds a chosen one

    def teardown(self, stage: str) -> None:
        self._while_training.close()

    def test_step(self, window: Tensor, batch_idx: int) -> None:
        forecast = self.adapter(self.backbone, window[:, : self.context_length], self.horizon)
        truth = window[:, self.context_length :].index_select(-1, self.adapter.targets)
        for name, metric in (("test_mse", self.test_mse), ("test_mae", self.test_mae)):
            metric.update(forecast.flatten(), truth.flatten())
            self.log(name, metric)


class ProtocolData(WindowDataModule):
    """Windows of the published split, scaled by the train rows.

    Args:
        name: of a data set in the catalogue, or a csv or parquet file with one numeric column a channel.
        context_length, horizon, future, seed: filled in.
        split: a rule of `dualweaver.data.splits`; the catalogue's where None, 70/10/20 % for a file.
        stride: of the training windows, at another phase every epoch; 1 takes all of them, as published.
        evaluation_stride: of the validation and test windows.
        batch_size: windows of a training step; `--trainer.accumulate_grad_batches` makes a step of several.
        validation_batch_size: the same without gradients; chosen by the number of channels where None.
    """

    def __init__(
        self,
        name: str,
        context_length: int,
        horizon: int,
        future: int,
        *,
        split: str | None = None,
        stride: int = 1,
        evaluation_stride: int = 1,
        batch_size: int = 32,
        validation_batch_size: int | None = None,
        seed: int = 0,
    ) -> None:
        rule = split or ("ratio" if _is_file(name) else describe_dataset(name).split)
        parts = protocol_segments(_table(name), rule, context_length)
        length = context_length + horizon
        super().__init__(
            _windows(parts.train, context_length + future),
            _windows(parts.validation, length, evaluation_stride),
            stride=stride,
            batch_size=batch_size,
            validation_batch_size=validation_batch_size or max(1, SERIES_PER_BATCH // (2 * parts.train.shape[1])),
            seed=seed,
        )
        self.test_windows = _windows(parts.test, length, evaluation_stride)

    def test_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.test_windows, batch_size=self.validation_batch_size, collate_fn=whole_batch)


def _windows(rows: np.ndarray, length: int, stride: int = 1) -> WindowDataset:
    table = torch.as_tensor(rows, dtype=torch.float32)
    return WindowDataset(table, torch.arange(0, len(table) - length + 1, stride), length)


def _is_file(name: str) -> bool:
    return Path(name).suffix in (".csv", ".gz", ".parquet")


@cache
def _table(name: str) -> np.ndarray:
    """`[time, channel]`; gaps are filled as `DualWeaver.fit` would."""
    frame = read_file(Path(name)).select_dtypes("number") if _is_file(name) else load_dataset(name)
    return frame.interpolate(limit_direction="both").to_numpy(float)


def _channels(name: str) -> int:
    return _table(name).shape[1] if _is_file(name) else describe_dataset(name).channels


class ExperimentCLI(LightningCLI):
    """What is given once and used twice, and the callbacks of the protocol."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for target in ("model.seed", "data.seed"):
            parser.link_arguments("seed_everything", target, compute_fn=int)
        parser.link_arguments("trainer.max_epochs", "model.max_epochs")
        parser.link_arguments("data.name", "model.channels", compute_fn=_channels)
        for name in ("context_length", "horizon", "future"):
            parser.link_arguments(f"model.{name}", f"data.{name}", apply_on="instantiate")
        parser.add_lightning_class_args(EarlyStopping, "early_stopping")
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.set_defaults(
            {
                "early_stopping.monitor": "val_mse",
                "checkpoint.monitor": "val_mse",
                "checkpoint.filename": "best",
                "checkpoint.save_last": True,
                "checkpoint.enable_version_counter": False,
            }
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {name: skipped for name, skipped in LightningCLI.subcommands().items() if name != "predict"}

    def before_fit(self) -> None:
        started = self.config.fit.ckpt_path
        if started is not None:  # what was best before stays the best until it is beaten
            kept = self.trainer.checkpoint_callback
            assert isinstance(kept, ModelCheckpoint)
            kept.dirpath = os.path.relpath(Path(started).parent)

    def after_fit(self) -> None:
        kept = self.trainer.checkpoint_callback
        assert isinstance(kept, ModelCheckpoint)
        told = f"lowest validation MSE {float(kept.best_model_score):.5f}: {kept.best_model_path}"
        adapter = self.model.adapter
        if self.trainer.is_global_zero and isinstance(adapter, DualWeaverAdapter) and adapter.shares:
            share, error = self._settle_share(Path(kept.best_model_path))
            told += f"; {error:.5f} with {share:g} of the filter's edit, kept with it"
        print(told)

    def _settle_share(self, file: Path) -> tuple[float, float]:
        """Leave model and checkpoint at the best weights, with the share of the edit that validation prefers."""
        state = torch.load(file, map_location="cpu", weights_only=True)
        module = self.model
        module.on_load_checkpoint(state)
        module.load_state_dict(state["state_dict"])
        windows, seed = self.datamodule.validation_windows, module.settings.seed
        adapter = module.adapter
        errors = choose_share(adapter, module.backbone, windows, module.context_length, seed)
        assert adapter.weaver.context_filter is not None
        share = float(adapter.weaver.context_filter.strength)
        strength = state["state_dict"]["adapter.weaver.context_filter.strength"]
        if strength != share:
            strength.fill_(share)
            module.on_save_checkpoint(state)
            write_aside(file, lambda aside: torch.save(state, aside))
        return share, errors[share]


def main(arguments: list[str] | None = None) -> ExperimentCLI:
    """Run a command line."""
    csv = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "runs", "name": ""}}
    defaults: dict[str, Any] = {
        "logger": csv,
        "max_epochs": 10,
        "gradient_clip_val": 1.0,
        "num_sanity_val_steps": 0,
        "devices": 1,
        "enable_model_summary": False,
        "log_every_n_steps": 1000,
    }
    return ExperimentCLI(
        Experiment,
        ProtocolData,
        seed_everything_default=0,
        trainer_defaults=defaults,
        auto_configure_optimizers=False,
        args=arguments,
    )


if __name__ == "__main__":
    try:
        main()
    except DualWeaverError as error:
        sys.exit(f"train.py: {error}")
