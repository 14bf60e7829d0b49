"""Checkpoints of backbones: nothing in them runs, and nothing is made in a size that they merely claim."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fracast
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_backbones import TINY_CHRONOS, tiny_flowstate, tiny_timesfm
from toys import refusal
from traps import HEADERS, cheap_refusal, edit, traps

from dualweaver.backbones import load_backbone
from dualweaver.backbones.sundial import SundialConfig, SundialForPrediction
from dualweaver.backbones.timer import TimerConfig, TimerForPrediction
from dualweaver.backbones.ttm import TinyTimeMixerConfig, TinyTimeMixerForPrediction

pytestmark = pytest.mark.usefixtures("one_thread")

PATCHES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
MODELS: dict[str, Callable[[], Any]] = {
    "ttm": lambda: TinyTimeMixerForPrediction(
        TinyTimeMixerConfig(
            context_length=64, prediction_length=16, patch_length=8, d_model=16, decoder_d_model=8, num_layers=1
        )
    ),
    "timer": lambda: TimerForPrediction(TimerConfig(input_token_len=12, output_token_lens=[12], **PATCHES)),
    "sundial": lambda: SundialForPrediction(SundialConfig(input_token_len=8, output_token_lens=[24], **PATCHES)),
    "timesfm": tiny_timesfm,
    "flowstate": tiny_flowstate,
}
if find_spec("chronos"):  # the extra
    MODELS |= TINY_CHRONOS


@pytest.fixture(params=[*MODELS, "fracast"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, build in MODELS.items():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            build().save_pretrained(folder / name)
    shutil.copytree(Path(fracast.__file__).parent / "weights", folder / "fracast")
    return {name: folder / name for name in (*MODELS, "fracast")}


@pytest.fixture
def checkpoint(name: str, originals: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(originals[name], tmp_path / "checkpoint")


# Backbones


def code(sprung: Path) -> str:
    return f"from pathlib import Path\nPath({str(sprung)!r}).touch()\nclass Evil: pass\n"


def test_code_beside_a_checkpoint_is_never_imported(name, checkpoint, sprung):
    expected = load_backbone(f"{name}:{checkpoint}").fingerprint()
    classes = {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    edit(checkpoint / "config.json", auto_map=classes, architectures=["Evil"], custom_pipelines={"evil": "evil.Evil"})
    for file in ("evil.py", "modeling_evil.py", "__init__.py", "configuration_evil.py", "sitecustomize.py"):
        (checkpoint / file).write_text(code(sprung))
    (checkpoint / "custom_generate").mkdir()
    (checkpoint / "custom_generate" / "generate.py").write_text(code(sprung))
    assert load_backbone(f"{name}:{checkpoint}").fingerprint() == expected


def test_pickles_beside_the_weights_are_never_opened(name, checkpoint, sprung):
    expected = load_backbone(f"{name}:{checkpoint}").fingerprint()
    for content in traps(sprung, checkpoint):
        for file in ("pytorch_model.bin", "model.pt", "training_args.bin", "optimizer.pt", "adapter_model.bin"):
            (checkpoint / file).write_bytes(content)
        assert load_backbone(f"{name}:{checkpoint}").fingerprint() == expected


def test_pickles_in_the_place_of_the_weights_are_refused(name, checkpoint, sprung):
    weights = checkpoint / "model.safetensors"
    for content in traps(sprung, checkpoint):
        weights.write_bytes(content)
        assert "model.safetensors" in refusal(load_backbone, f"{name}:{checkpoint}")
    weights.rename(checkpoint / "pytorch_model.bin")
    assert "model.safetensors" in refusal(load_backbone, f"{name}:{checkpoint}")


@pytest.mark.parametrize("name", MODELS, indirect=True)
def test_an_index_that_leads_to_pickles_or_elsewhere_is_refused(name, checkpoint, sprung, tmp_path):
    weights = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "pytorch_model.bin").write_bytes(traps(sprung, tmp_path)[0])
    (tmp_path / "outside.safetensors").write_bytes(b"")
    for target, message in (
        ("pytorch_model.bin", "pytorch_model.bin is damaged, or no safetensors file"),
        ("../outside.safetensors", "which is no file beside it"),
        (str(tmp_path / "outside.safetensors"), "which is no file beside it"),
        (["x"], "which is no file beside it"),
        ("absent.safetensors", "absent.safetensors is missing"),
    ):
        index = {"metadata": {}, "weight_map": dict.fromkeys(weights, target)}
        (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
        assert message in refusal(load_backbone, f"{name}:{checkpoint}")
    for text in ("{}", "[]", "{", '{"weight_map": 3}'):
        (checkpoint / "model.safetensors.index.json").write_text(text)
        assert "index.json" in refusal(load_backbone, f"{name}:{checkpoint}")


@pytest.mark.parametrize("name", MODELS, indirect=True)
def test_weights_in_shards_are_read(name, checkpoint):
    expected = load_backbone(f"{name}:{checkpoint}").fingerprint()
    weights = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    shards = {tensor: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, tensor in enumerate(weights)}
    for shard in set(shards.values()):
        part = {tensor: weights[tensor] for tensor in weights if shards[tensor] == shard}
        save_file(part, checkpoint / shard, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": shards}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load_backbone(f"{name}:{checkpoint}").fingerprint() == expected


@pytest.mark.parametrize("name", MODELS, indirect=True)
def test_a_hub_name_is_read_from_the_cache_under_the_same_rules(name, checkpoint, sprung, tmp_path, monkeypatch):
    expected = load_backbone(f"{name}:{checkpoint}").fingerprint()
    cache = tmp_path / "cache" / "models--somebody--model"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("0" * 40)
    edit(checkpoint / "config.json", auto_map={"AutoModel": "evil.Evil"})
    (checkpoint / "evil.py").write_text(code(sprung))
    shutil.copytree(checkpoint, cache / "snapshots" / ("0" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    assert load_backbone(f"{name}:somebody/model").fingerprint() == expected
    edit(cache / "snapshots" / ("0" * 40) / "config.json", model_type="bert")
    assert "'bert'" in refusal(load_backbone, f"{name}:somebody/model")


def test_only_configuration_and_weights_are_downloaded(monkeypatch, originals):
    asked: dict[str, Any] = {}

    def download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(originals["timer"])

    monkeypatch.setattr("dualweaver.backbones.pretrained.snapshot_download", download)
    load_backbone("timer:somebody/model@abc")
    assert (asked["name"], asked["revision"]) == ("somebody/model", "abc")
    assert asked["allow_patterns"] == ["config.json", "model.safetensors.index.json", "*.safetensors"]


def test_another_models_checkpoint_is_refused_by_name(name, checkpoint):
    for other in {*MODELS, "fracast"} - {name}:
        message = refusal(load_backbone, f"{other}:{checkpoint}")
        assert str(checkpoint) in message


@pytest.mark.parametrize("name", MODELS, indirect=True)
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantised"),
        ({"dtype": "float99"}, "float99"),
        ({"dtype": 7}, "checkpoint"),
    ],
)
def test_settings_that_lead_to_other_code_are_refused(name, setting, message, checkpoint):
    edit(checkpoint / "config.json", **setting)
    assert message in refusal(load_backbone, f"{name}:{checkpoint}")


def test_another_librarys_adapter_is_not_followed(originals, tmp_path):
    folder = shutil.copytree(originals["ttm"], tmp_path / "adapter")
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "somebody/else", "peft_type": "LORA"}')
    assert "adapter_config.json" in refusal(load_backbone, f"ttm:{folder}")


def test_weights_of_another_type_are_refused_by_name(name, checkpoint):
    weights = load_file(checkpoint / "model.safetensors")
    first = min(tensor for tensor in weights if weights[tensor].is_floating_point())
    for dtype, shown in ((torch.int8, "I8"), (torch.int64, "I64"), (torch.bool, "BOOL")):
        save_file(weights | {first: weights[first].to(dtype)}, checkpoint / "model.safetensors", {"format": "pt"})
        assert f"{first!r} holds {shown}" in refusal(load_backbone, f"{name}:{checkpoint}")


# Sizes


SIZES: dict[str, list[str]] = {
    "ttm": ["d_model", "num_layers", "decoder_d_model", "decoder_num_layers", "expansion_factor", "prediction_length"],
    "timer": ["hidden_size", "intermediate_size", "num_hidden_layers", "input_token_len"],
    "sundial": ["hidden_size", "intermediate_size", "num_hidden_layers", "input_token_len", "flow_loss_depth"],
    "timesfm": ["hidden_size", "intermediate_size", "num_hidden_layers", "patch_length", "horizon_length", "head_dim"],
    "flowstate": ["embedding_feature_dim", "encoder_num_layers", "encoder_state_dim", "decoder_dim"],
    "chronos-bolt": ["d_model", "d_kv", "d_ff", "num_layers", "num_heads"],
    "chronos-2": ["d_model", "d_kv", "d_ff", "num_layers", "num_heads"],
    "fracast": ["d_model", "n_stages", "head_d_ff", "head_layers", "head_fc_layers", "horizon"],
}


@pytest.mark.parametrize("size", [2**14, 10**9, 10**18, 10**30, -1, "many", None, 1.5, [3]], ids=str)
def test_absurd_sizes_in_a_configuration_are_refused_before_anything_is_made(name, size, checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    for setting in SIZES[name]:
        changed = config | {setting: size}
        if name == "fracast":
            assert setting in config["model"]
            changed = config | {"model": config["model"] | {setting: size}}
        (checkpoint / "config.json").write_text(json.dumps(changed))
        message = cheap_refusal(load_backbone, f"{name}:{checkpoint}")
        assert str(checkpoint) in message or setting in message


def test_many_levels_and_outputs_are_refused_before_anything_is_made(originals, tmp_path):
    ttm = shutil.copytree(originals["ttm"], tmp_path / "ttm")
    for levels in (30, 10**9):
        edit(ttm / "config.json", adaptive_patching_levels=levels)
        cheap_refusal(load_backbone, f"ttm:{ttm}")
    timer = shutil.copytree(originals["timer"], tmp_path / "timer")
    for lengths in ([10**9], [12] * 1000, [10**30], ["x"], []):
        edit(timer / "config.json", output_token_lens=lengths)
        cheap_refusal(load_backbone, f"timer:{timer}")


@pytest.mark.parametrize("name", MODELS, indirect=True)
def test_layers_that_the_configuration_leaves_out_are_not_dropped_in_silence(name, checkpoint):
    for setting in ("num_layers", "num_hidden_layers", "flow_loss_depth", "adaptive_patching_levels"):
        value = json.loads((checkpoint / "config.json").read_text()).get(setting)
        if value:
            edit(checkpoint / "config.json", **{setting: value - 1})
            assert "is in a layer that the configuration" in refusal(load_backbone, f"{name}:{checkpoint}")
            edit(checkpoint / "config.json", **{setting: value})


@pytest.mark.parametrize("name", MODELS, indirect=True)
def test_constants_that_other_code_keeps_beside_the_weights_are_left_alone(name, checkpoint):
    expected = load_backbone(f"{name}:{checkpoint}").fingerprint()
    weights = load_file(checkpoint / "model.safetensors")
    layer = max(tensor for tensor in weights if ".0." in tensor).rpartition(".0.")[0] + ".0."
    save_file(weights | {f"{layer}inv_freq": torch.ones(3)}, checkpoint / "model.safetensors", {"format": "pt"})
    assert load_backbone(f"{name}:{checkpoint}").fingerprint() == expected


@pytest.mark.parametrize("kind", HEADERS)
def test_sizes_that_a_file_of_weights_announces_are_not_believed(name, kind, checkpoint):
    (checkpoint / "model.safetensors").write_bytes(HEADERS[kind])
    assert "model.safetensors" in cheap_refusal(load_backbone, f"{name}:{checkpoint}")
