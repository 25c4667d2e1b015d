"""Backbones larger than one device: their layers are dealt to all processes and gathered one at a time (FSDP)."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from sekv.backbone import Backbone
from train.errors import ConfigError


def shard_backbone(backbone: Backbone, device: torch.device) -> None:
    """Shards the decoder layers over all processes; embeddings, norm and head stay whole on `device`.

    The adapter is small and stays whole too: the strategy (ddp) keeps its gradients together.

    Args:
        backbone: frozen, on the host: layers go to the device one by one, so it never holds the whole.
        device: of this process.

    Raises:
        ConfigError: there is one process only.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() < 2:
        raise ConfigError(
            "model.shard deals the backbone to several processes, and there is one; set trainer.devices and "
            "trainer.strategy ddp, or model.shard false"
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    layers = cast(nn.ModuleList, backbone.model.get_decoder().get_submodule("layers"))
    for layer in layers:
        fully_shard(cast(Any, layer), mesh=mesh)
    sharded = {id(p) for layer in layers for p in layer.parameters()}
    moved: dict[int, nn.Parameter] = {}  # embeddings and head may share one
    for module in backbone.model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in sharded:
                if id(parameter) not in moved:
                    moved[id(parameter)] = nn.Parameter(parameter.to(device), requires_grad=False)
                setattr(module, name, moved[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def check_precision(precision: object) -> None:
    """Refuses a trainer precision that would compute routing, softmax and losses in half precision.

    Raises:
        ConfigError: says which option is meant.
    """
    if precision not in (None, 32, "32", "32-true"):
        raise ConfigError(
            f"trainer.precision {precision} would put the adapter and the losses in half precision; leave it at "
            "32-true and set model.dtype bfloat16: the backbone, keys and values are bfloat16 then, the rest float32"
        )
