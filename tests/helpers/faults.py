"""Kills processes while they fit and lets others go on: `python faults.py FOLDER MOMENTS SEED`.

One process loads all libraries and forks those that fit, so that a fit costs a fraction of a second. A child stops
before every forward of the backbone and every operation on a file of its folder until it is told to go on, so that a
seed always kills at the same moments. Prints one JSON row a moment.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from toys import Toy, waves, weaver

FITS: dict[str, dict[str, Any]] = {
    "dualweaver": {"max_epochs": 6, "regularisation": 0.5, "window_stride": 3, "channel_sample": 2},
    "paper": {"max_epochs": 30, "objective": "paper", "learning_rate": 0.1, "window_stride": 4},  # stops early
    "adapts": {"max_epochs": 4, "adapter": "adapts", "batch_size": 20},
    "fine-tune first": {"max_epochs": 3, "fine_tune": True, "window_stride": 2},
}
FILES = frozenset({"open", "os.mkdir", "os.rename", "os.remove", "os.scandir", "os.listdir"})


class Ticking(Toy):
    """Tells of every forward; dropout makes fine-tuning depend on random numbers."""

    def __init__(self, tick: Callable[[], None]) -> None:
        super().__init__()
        self.tick = [tick]

    def __deepcopy__(self, memo: dict[int, Any]) -> Ticking:
        copy = Ticking(self.tick[0])
        copy.load_state_dict(self.state_dict())
        return copy

    def forward(self, x: Tensor) -> Tensor:
        self.tick[0]()
        return super().forward(torch.nn.functional.dropout(x, 0.1, self.training))


def fit(name: str, folder: Path | None, tick: Callable[[], None]) -> str:
    """Fit, and give the hash of all weights, the history and a forecast."""
    model = weaver(Ticking(tick), **FITS[name]).fit(waves(), resume=folder)
    digest = hashlib.sha256()
    for module in (model.pipeline_.adapter, model.pipeline_.backbone):
        for weights, tensor in module.state_dict().items():
            digest.update(weights.encode() + tensor.numpy().tobytes())
    digest.update(model.history_.to_csv().encode() + model.predict(level=[80]).to_csv().encode())
    return digest.hexdigest()


def in_child(name: str, folder: Path | None, kill_at: int | None = None) -> tuple[str | None, int]:
    """The hash that a process of its own found, None if it was killed; and how often it stopped."""
    (told, tell), (heard, let) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(tell, b"=" + fit(name, folder, lambda: _stop(tell, heard, folder)).encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    os.close(tell)
    os.close(heard)
    found, ticks = None, 0
    while (message := os.read(told, 1)) == b".":
        ticks += 1
        if ticks == kill_at:
            os.kill(child, signal.SIGKILL)
            break
        os.write(let, b".")
    if message == b"=":
        found = os.read(told, 64).decode()
    os.close(told)
    os.close(let)
    _, status = os.waitpid(child, 0)
    ended = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    if ended != (0 if found else -signal.SIGKILL):
        raise RuntimeError(f"{name} ended with {ended} at stop {ticks}")
    return found, ticks


_watched: list[Callable[[str, tuple[Any, ...]], None]] = []


def _stop(tell: int, heard: int, folder: Path | None) -> None:
    def stop() -> None:
        os.write(tell, b".")
        os.read(heard, 1)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in FILES and str(arguments[0]).startswith(str(folder)):
            stop()

    if not _watched:  # from the first forward on
        _watched.append(watch)
        flush = os.fsync

        def fsync(fd: Any) -> None:
            stop()
            flush(fd)

        os.fsync = fsync
        if folder is not None:
            sys.addaudithook(watch)
    stop()


def main(folder: Path, moments: int, seed: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    fit("fine-tune first", None, lambda: None)  # whatever is loaded on first use
    chance = random.Random(seed)
    expected = {name: in_child(name, None)[0] for name in FITS}
    stops = {}
    for name in FITS:
        found, stops[name] = in_child(name, folder / f"{name} undisturbed")
        print(json.dumps({"fit": name, "kills": [], "stops": stops[name], "equal": found == expected[name]}))
    for moment in range(moments):
        name = list(FITS)[moment % len(FITS)]
        kills, again = [chance.randint(1, stops[name])], moment % 5 == 4  # every fifth is killed once more
        place = folder / f"{name} {moment}"
        in_child(name, place, kills[0])
        if again:
            found, ticks = in_child(name, place, chance.randint(1, stops[name] // 4))
            kills.append(ticks)
        found, left = in_child(name, place)
        print(json.dumps({"fit": name, "kills": kills, "stops": left, "equal": found == expected[name]}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
