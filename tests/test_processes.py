"""Two processes do what one does: data parallel training, and a sharded backbone."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import two_processes
from places import HELPERS
from toy_backbones import NormalisedToy

from dualweaver.adapters import DualWeaverAdapter
from dualweaver.data.module import PhasedSampler
from dualweaver.errors import SettingError
from dualweaver.fit.module import AdaptationModule, TrainingSettings
from dualweaver.planning.sharding import shard_blocks

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What `two_processes.py` found in each."""
    output = tmp_path_factory.mktemp("processes") / "found"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(HELPERS / "two_processes.py"), str(output)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(f"{output}.{rank}", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("objective", ["reconstruction", "paper"])
def test_data_parallel_training_gives_the_adapter_of_one_process_with_the_same_batch(
    objective: str, both: list[dict[str, Any]]
) -> None:
    alone = two_processes.trained(objective, accumulate=2)
    first, second = (found["trained"][objective] for found in both)
    assert first["weights"].keys() == alone["weights"].keys()
    for name, weights in alone["weights"].items():
        assert torch.equal(first["weights"][name], second["weights"][name]), name
        torch.testing.assert_close(first["weights"][name], weights, rtol=1e-4, atol=1e-6)
    untrained, *trained = alone["history"]
    assert trained[-1]["val_mse"] != pytest.approx(untrained["val_mse"], rel=1e-3)
    for ours, theirs in zip(first["history"], alone["history"], strict=True):
        assert ours["val_mse"] == pytest.approx(theirs["val_mse"], rel=1e-4)
    for ours, theirs in zip(first["history"][1:], trained, strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-4)


def test_the_estimator_is_fitted_by_both_and_is_the_same_in_both(both: list[dict[str, Any]]) -> None:
    first, second = (found["fitted"] for found in both)
    assert torch.equal(first["forecast"], second["forecast"])
    assert first["errors"] == second["errors"]
    alone = two_processes.forecast()  # other draws of dropout
    torch.testing.assert_close(first["forecast"], alone["forecast"], rtol=0.05, atol=0)
    assert first["errors"] == pytest.approx(alone["errors"], rel=0.1)


def test_a_sharded_backbone_gives_the_gradients_of_a_whole_one(both: list[dict[str, Any]]) -> None:
    whole = two_processes.gradients(sharded=False)
    assert whole["share"] == 1
    for found in both:
        assert found["sharded"]["share"] < 0.7  # the embedding and the head are on both
        assert torch.equal(found["sharded"]["loss"], whole["loss"])
        for ours, theirs in zip(found["sharded"]["gradients"], whole["gradients"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)


def test_a_backbone_without_blocks_is_not_sharded() -> None:
    with pytest.raises(SettingError, match="'normalised-toy' has no blocks to shard"):
        shard_blocks(NormalisedToy())


def test_processes_share_every_batch_and_leave_nothing_twice() -> None:
    alone = PhasedSampler(50, 2, seed=1, batch_size=3)
    parts = [PhasedSampler(50, 2, seed=1, batch_size=3, replicas=2, rank=rank) for rank in range(2)]
    for epoch in range(3):
        for sampler in (alone, *parts):
            sampler.set_epoch(epoch)
        first, second = (list(part) for part in parts)
        assert len(first) == len(second) == len(parts[0]) == 12
        order = list(alone)
        assert len(order) == 25
        for batch in range(4):
            mine = [*first[3 * batch : 3 * batch + 3], *second[3 * batch : 3 * batch + 3]]
            assert mine == order[6 * batch : 6 * batch + 6]


@pytest.mark.parametrize("objective", ["reconstruction", "paper"])
def test_frozen_weights_and_references_are_outside_of_the_reducer(objective: str) -> None:
    adapter, backbone = DualWeaverAdapter(3, range(3), objective=objective), NormalisedToy()
    module = AdaptationModule(adapter, backbone, TrainingSettings(), context_length=12, horizon=4, windows=5)
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore"))  # noqa: B009 - what torch reads
    names = {name for name, _ in module.named_parameters()} | {name for name, _ in module.named_buffers()}
    assert names - ignored == {name for name in names if name.startswith("adapter.")}
