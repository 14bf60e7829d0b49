"""Ctrl-C while training: the first ends it after the batch at hand, the second at once."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

__all__ = ["StopOnInterrupt"]


class StopOnInterrupt(Callback):
    """Ends training early, with a last validation, where Lightning would end the whole process.

    Attributes:
        asked: whether the user pressed Ctrl-C.
    """

    def __init__(self, *, verbose: bool = False) -> None:
        self.verbose = verbose
        self.asked = self._told = self._broken_off = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Takes the place of Python's own handler; only the main thread has one."""
        main = threading.current_thread() is threading.main_thread()
        if not main or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            yield
            return
        earlier = signal.signal(signal.SIGINT, self._hear)
        try:
            yield
        except SystemExit:  # what Lightning makes of a KeyboardInterrupt
            if self._broken_off:
                raise KeyboardInterrupt from None
            raise
        finally:
            signal.signal(signal.SIGINT, signal.SIG_DFL if earlier is None else earlier)

    def _hear(self, *_: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if self.asked and not self._told and self.verbose:
            print("stopping: what was learned is validated; Ctrl-C again gives it up", file=sys.stderr)
            self._told = True
        trainer.should_stop |= self.asked

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.should_stop |= self.asked and not trainer.sanity_checking

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._broken_off = isinstance(exception, KeyboardInterrupt)
