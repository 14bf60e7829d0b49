"""A frozen backbone in pieces over several devices, for one that does not fit a single one."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from dualweaver.backbones import Backbone
from dualweaver.compute.recompute import part_names
from dualweaver.errors import SettingError

__all__ = ["shard_blocks"]


def shard_blocks(backbone: Backbone, mesh: DeviceMesh | None = None) -> None:
    """Give every process a share of each block's weights; a block is put together while it is used (FSDP).

    Embedding and head stay whole. Training is then that of `DistributedDataParallel` for the adapter: every process
    takes its part of a batch and averages gradients of the adapter only, since frozen weights have none.

    Args:
        backbone: one whose blocks are parts (Timer, Sundial); changed in place.
        mesh: of devices, all processes of the group where None.

    Raises:
        SettingError: the backbone has no blocks, or no process group has been started.
    """
    blocks = [name.removesuffix(".forward") for name in part_names(backbone) if name.endswith(".forward")]
    if not blocks or not backbone.large_products:
        raise SettingError(f"the backbone {backbone.name!r} has no blocks to shard; it fits a single device")
    if not dist.is_initialized():
        raise SettingError("no process group: start the script with torchrun, and call init_process_group first")
    kind = next(backbone.parameters()).device.type
    mesh = mesh or init_device_mesh(kind, (dist.get_world_size(),))
    for block in blocks:
        fully_shard(backbone.get_submodule(block), mesh=mesh)
    torch.distributed.barrier()
