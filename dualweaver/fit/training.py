"""Training any adapter around a frozen (or thawed) backbone with Lightning."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain

import lightning as L
from lightning.pytorch.callbacks import Callback, EarlyStopping

from dualweaver.adapters import Adapter
from dualweaver.backbones import Backbone
from dualweaver.compute.allocator import keep_freed_memory
from dualweaver.compute.recompute import recomputing
from dualweaver.compute.seeding import seeded
from dualweaver.data.module import WindowDataModule
from dualweaver.fit.cache import Kept
from dualweaver.fit.callbacks import KeptWeights, ProgressReport
from dualweaver.fit.interrupt import StopOnInterrupt
from dualweaver.fit.module import AdaptationModule, TrainingSettings
from dualweaver.fit.resume import SaveEpochs, Stage
from dualweaver.notices import notify

__all__ = ["train_adapter"]


def train_adapter(
    adapter: Adapter,
    backbone: Backbone,
    data: WindowDataModule,
    settings: TrainingSettings,
    *,
    context_length: int,
    horizon: int,
    label: str = "adapting",
    stage: Stage | None = None,
    references: Kept | None = None,
) -> KeptWeights:
    """Train an adapter, and leave it (and a thawed backbone) at its best validation error, or as it was last.

    `settings.patience` says which. The untrained adapter is scored first and counts as a candidate for the best. The
    backbone is frozen afterwards, whatever happens, and stays on its device. Ctrl-C ends training after the batch at
    hand, with a notice; another error passes through, with the weights where they were when it occurred. With `stage`,
    training goes on where an earlier process left it, and is not repeated where that had finished. `references` keeps
    the untouched backbone's losses for later fits.

    Returns:
        The course of training.
    """
    module = AdaptationModule(
        adapter,
        backbone,
        settings,
        context_length=context_length,
        horizon=horizon,
        windows=len(data.train_windows),
    )
    if references and (known := references.read()):
        module.references.copy_(known["losses"])
    unknown = int(module.references.isnan().sum())
    course, stop = KeptWeights(), StopOnInterrupt(verbose=settings.verbose)
    callbacks: list[Callback] = [course, stop]
    if settings.patience is not None:
        callbacks.append(EarlyStopping("val_mse", patience=settings.patience, mode="min"))
    if settings.verbose:
        callbacks.append(ProgressReport(label))
    kept, start = (stage.result(), stage.newest()) if stage else (None, None)
    if stage:
        callbacks.append(SaveEpochs(stage))
    thawed = backbone.unfrozen() if adapter.trains_backbone else nullcontext()
    again = recomputing(backbone, settings.recompute)
    device = next(chain(backbone.parameters(), adapter.buffers())).device
    with seeded(settings.seed), _quiet(), thawed, again, stop.listening(), keep_freed_memory():
        if kept is not None:
            course.load_state_dict(kept)
        else:
            trainer = L.Trainer(
                max_epochs=settings.max_epochs,
                accumulate_grad_batches=settings.accumulate,
                gradient_clip_val=settings.gradient_clip,
                callbacks=callbacks,
                plugins=stage,
                logger=False,
                enable_checkpointing=stage is not None,
                enable_model_summary=False,
                enable_progress_bar=False,
                # all of validation: scores the untrained adapter, which a checkpoint holds already
                num_sanity_val_steps=0 if start else -1,
                accelerator="auto",
                devices=settings.devices,
                num_nodes=settings.nodes,
                strategy=settings.strategy,
                use_distributed_sampler=False,  # the data know their process
            )
            trainer.fit(module, datamodule=data, ckpt_path=start)
            if references and trainer.is_global_zero and int(module.references.isnan().sum()) < unknown:
                references.write({"losses": module.references})
            if settings.patience is None and not stop.asked:
                course.take(module)
        course.restore(module)
        module.to(device)
    if stop.asked:
        course.interrupted = True
        notify(f"{label}: interrupted; the best weights so far (epoch {course.epoch}) are kept")
    elif stage and kept is None:
        stage.finish(course.state_dict())
    return course


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Lightning's hints, which speak to those who wrote the training script."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "lightning")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning")
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
