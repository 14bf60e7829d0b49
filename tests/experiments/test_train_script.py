"""The training script by its command line, on toy sizes."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from places import EXPERIMENTS
from small_backbones import FACTORIES, tiny_ttm
from toys import waves

from dualweaver.data.catalogue import describe_dataset
from dualweaver.errors import SettingError

pytestmark = pytest.mark.usefixtures("one_thread")


CONFIGS = sorted((EXPERIMENTS / "configs").glob("*.yaml"))


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script, in an empty folder with a small table and small checkpoints."""
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py"])
    waves(300).rename_axis("date").to_csv("data.csv")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tiny_ttm().save_pretrained("ttm")
        for name in ("timer", "sundial"):
            FACTORIES[name]().model.save_pretrained(name)  # type: ignore[operator, union-attr]
    for name in ("ttm", "timer", "sundial"):
        monkeypatch.setenv(f"DUALWEAVER_{name.upper()}", name)
    return importlib.import_module("train")


def run(train: ModuleType, command: str, **options: Any) -> Any:
    """A command with the first configuration, on the small table."""
    base = {
        "data.name": "data.csv",
        "data.stride": 2,
        "model.horizon": 8,
        "trainer.max_epochs": 2,
        "trainer.accelerator": "cpu",
        "trainer.enable_progress_bar": "false",
    }
    given = [f"--{name}={value}" for name, value in (base | options).items()]
    return train.main([command, f"--config={CONFIGS[2]}", *given])


def weights(file: Path) -> dict[str, Any]:
    state = torch.load(file, weights_only=True)["state_dict"]
    return {name: tensor.numpy().tobytes() for name, tensor in state.items()}


def test_a_resumed_training_ends_with_the_same_bits_and_the_test_rows_are_scored(
    train: ModuleType, tmp_path: Path
) -> None:
    options = {"checkpoint.filename": "{epoch}", "checkpoint.save_top_k": -1, "model.objective": "paper"}
    run(train, "fit", **options, **{"trainer.max_epochs": 3})
    folder = tmp_path / "runs" / "version_0" / "checkpoints"
    expected = weights(folder / "epoch=2.ckpt")
    (folder / "epoch=2.ckpt").unlink()
    resumed = {**options, "trainer.max_epochs": 3, "ckpt_path": folder / "epoch=0.ckpt"}
    run(train, "fit", **resumed)
    assert weights(folder / "epoch=2.ckpt") == expected
    log = pd.read_csv(tmp_path / "runs" / "version_0" / "metrics.csv")
    assert {"val_mse", "train_loss"} <= set(log.columns)
    scored = run(train, "test", **{"model.objective": "paper", "ckpt_path": folder / "epoch=2.ckpt"})
    module, windows = scored.model.eval(), scored.datamodule.test_windows
    batch = windows.__getitems__(range(len(windows)))
    with torch.no_grad():
        error = (
            module.adapter(module.backbone, batch[:, : module.context_length], 8) - batch[:, module.context_length :]
        )
    assert float(scored.trainer.callback_metrics["test_mse"]) == pytest.approx(float(error.square().mean()), rel=1e-5)
    assert float(scored.trainer.callback_metrics["test_mae"]) == pytest.approx(float(error.abs().mean()), rel=1e-5)


def test_the_checkpoint_that_is_best_before_a_resume_stays_the_best_until_it_is_beaten(
    train: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(train, "fit")
    folder = tmp_path / "runs" / "version_0" / "checkpoints"
    assert {file.name for file in folder.iterdir()} == {"best.ckpt", "last.ckpt"}
    state = torch.load(folder / "last.ckpt", weights_only=True)
    (kept,) = (value for name, value in state["callbacks"].items() if name.startswith("ModelCheckpoint"))
    kept["best_model_score"] = kept["kth_value"] = torch.tensor(0.0)  # nothing beats that
    kept["best_k_models"] = dict.fromkeys(kept["best_k_models"], torch.tensor(0.0))
    torch.save(state, folder / "last.ckpt")
    before = (folder / "best.ckpt").read_bytes()
    capsys.readouterr()
    run(train, "fit", **{"trainer.max_epochs": 3, "ckpt_path": folder / "last.ckpt"})
    assert capsys.readouterr().out.startswith("lowest validation MSE 0.00000: runs/version_0/checkpoints/best.ckpt; ")
    assert (folder / "best.ckpt").read_bytes() == before


def test_the_best_checkpoint_forecasts_with_the_share_of_the_edit_that_validation_prefers(
    train: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli = run(train, "fit", **{"model.learning_rate": 0.3})
    module, windows = cli.model.eval(), cli.datamodule.validation_windows
    batch = windows.__getitems__(range(len(windows)))
    errors = {}
    for share in module.adapter.shares:
        module.adapter.weaver.context_filter.strength.fill_(share)
        with torch.no_grad():
            forecast = module.adapter(module.backbone, batch[:, : module.context_length], 8)
        errors[share] = float((forecast - batch[:, module.context_length :]).square().mean())
    best = min(errors, key=errors.__getitem__)
    assert best != 0.5  # else this would hold without a choice
    folder = tmp_path / "runs" / "version_0" / "checkpoints"
    state = torch.load(folder / "best.ckpt", weights_only=True)["state_dict"]
    assert float(state["adapter.weaver.context_filter.strength"]) == best
    assert not any(name.startswith("backbone.") for name in state)
    assert f"{errors[best]:.5f} with {best:g} of the filter's edit" in capsys.readouterr().out
    assert {file.name for file in folder.iterdir()} == {"best.ckpt", "last.ckpt"}
    scored = run(train, "test", **{"ckpt_path": folder / "best.ckpt"})
    assert float(scored.model.adapter.weaver.context_filter.strength) == best
    # from there, epochs are compared at half again
    run(train, "fit", **{"trainer.max_epochs": 3, "ckpt_path": folder / "best.ckpt"})
    state = torch.load(folder / "last.ckpt", weights_only=True)["state_dict"]
    assert float(state["adapter.weaver.context_filter.strength"]) == 0.5


@pytest.mark.parametrize(
    "options",
    [
        {"model.adapter": "adapts", "model.precision": "32"},
        {"model.context_filter": "false", "model.compile": "false"},
        {"model.adapter": "fine-tune", "model.learning_rate": 1e-4},
        {
            "model.fusion": "cnn",
            "model.regularisation": 0.5,
            "model.channel_sample": 2,
            "trainer.accumulate_grad_batches": 2,
        },
        {"model.backbone": "fracast", "model.context_length": 64, "model.precision": "bf16"},
    ],
    ids=str,
)
def test_everything_is_chosen_on_the_command_line(options: dict[str, Any], train: ModuleType) -> None:
    cli = run(train, "fit", **{"trainer.max_epochs": 1, **options})
    assert torch.isfinite(cli.trainer.callback_metrics["val_mse"])
    assert not any(weight.requires_grad for weight in cli.model.backbone.parameters())


def test_zero_shot_is_scored_and_not_fitted(train: ModuleType) -> None:
    cli = run(train, "test", **{"model.adapter": "zero-shot"})
    assert torch.isfinite(cli.trainer.callback_metrics["test_mse"])
    with pytest.raises(SettingError, match="has nothing to fit"):
        run(train, "fit", **{"model.adapter": "zero-shot"})


@pytest.mark.parametrize("backbone", ["timer", "sundial"])
def test_the_protocol_of_the_paper_fine_tunes_and_then_adapts(backbone: str, train: ModuleType, tmp_path: Path) -> None:
    paper = EXPERIMENTS / "configs" / "paper"
    small = ["--data.name=data.csv", "--model.context_length=48", "--model.horizon=8", "--trainer.accelerator=cpu"]
    small += ["--trainer.max_epochs=1", "--trainer.enable_progress_bar=false"]
    command = ["fit", f"--config={CONFIGS[2]}", f"--config={paper / backbone}.yaml"]
    first = train.main([*command, f"--config={paper / 'sft.yaml'}", *small])
    assert first.model.adapter.name == "fine-tune"
    kept = tmp_path / "runs" / "version_0" / "checkpoints" / "best.ckpt"
    second = train.main([*command, *small, f"--model.fine_tuned={kept}"])
    assert second.model.adapter.native_loss
    tuned = {name: value for name, value in weights(kept).items() if name.startswith("backbone.")}
    assert {
        f"backbone.{name}": value.numpy().tobytes() for name, value in second.model.backbone.state_dict().items()
    } == tuned
    settings = second.model.settings
    assert (settings.learning_rate, settings.weight_decay, settings.betas) == (1e-2, 1e-3, (0.9, 0.95))
    assert (second.trainer.gradient_clip_val, second.datamodule.batch_size, second.datamodule.stride) == (1.0, 32, 1)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda file: file.stem)
def test_every_configuration_is_understood_alone_and_under_the_protocol_of_the_paper(
    config: Path, train: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    for paper in ([], ["timer.yaml"], ["sundial.yaml", "sft.yaml"]):
        overrides = [f"--config={EXPERIMENTS / 'configs' / 'paper' / name}" for name in paper]
        with pytest.raises(SystemExit) as left:
            train.main(["fit", f"--config={config}", *overrides, "--print_config"])
        assert left.value.code == 0
        shown = yaml.safe_load(capsys.readouterr().out)
        assert describe_dataset(shown["data"]["name"]).name.lower() == config.stem
        assert shown["model"]["weights"] is None
        assert shown["model"]["context_length"] == (2880 if paper else None)
        assert shown["early_stopping"]["patience"] == 3


def test_compiling_ends_with_the_training(train: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    functions: list[Any] = []

    def keep(function: Any) -> Any:
        functions.append(function)
        return function

    monkeypatch.setattr(torch, "compile", keep)
    cli = run(train, "fit", **{"model.compile": "true", "trainer.max_epochs": 1})
    assert [function.__name__ for function in functions] == ["forward"]
    assert not {"forward", "loss"} & set(vars(cli.model.backbone))


@pytest.mark.parametrize("wrong", ["--model.adapter=auto", "--model.precision=16", "--data.nonsense=1"])
def test_a_wrong_option_is_named(wrong: str, train: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        train.main(["fit", f"--config={CONFIGS[2]}", wrong])
    assert left.value.code == 2
    assert wrong.strip("-").split("=")[0].split(".")[1] in capsys.readouterr().err
