"""Networks of timm and torchvision, as small as their builders allow."""

from typing import Any

import torch
from cases import REGISTRY, Batch, Model, numbers, whole, without_chance
from torch import nn
from torch.nn.functional import cross_entropy

TIMM = {
    "resnet18": 64,
    "resnext26ts": 64,
    "regnetx_002": 64,
    "efficientnet_lite0": 64,
    "mobilenetv3_small_050": 64,
    "densenet121": 64,
    "convnext_atto": 64,
    "convnextv2_atto": 64,
    "vit_tiny_patch16_224": 64,
    "deit_tiny_patch16_224": 64,
    "swin_tiny_patch4_window7_224": 56,
    "mixer_s32_224": 64,
    "coatnet_nano_rw_224": 64,
    "poolformer_s12": 64,
    "ghostnet_050": 64,
    "levit_128s": 64,
    "maxvit_nano_rw_256": 64,
    "fastvit_t8": 64,
}
SMALL: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"depth": 2},
    "deit_tiny_patch16_224": {"depth": 2},
    "swin_tiny_patch4_window7_224": {"depths": (1, 1, 2, 1), "embed_dim": 24},
    "densenet121": {"block_config": (2, 2, 4, 2)},
    "convnext_atto": {"depths": (1, 1, 2, 1)},
    "convnextv2_atto": {"depths": (1, 1, 2, 1)},
}
SIZED = ("vit_", "deit_", "swin_", "mixer_", "coatnet_", "levit_", "maxvit_")

TORCHVISION = {
    "alexnet": 64,
    "squeezenet1_1": 64,
    "resnet50": 64,
    "googlenet": 64,
    "shufflenet_v2_x0_5": 64,
    "mnasnet0_5": 64,
    "mobilenet_v2": 64,
    "efficientnet_b0": 64,
}


def draws(size: int) -> Any:
    def draw(generator: torch.Generator) -> Batch:
        return {"0": numbers(generator, 2, 3, size, size)}

    return draw


def labels(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return (whole(generator, 10, 2),)


def classified(output: Any, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output, target)


def build_timm(name: str, size: int) -> Model:
    import timm

    options = SMALL.get(name, {}) | ({"img_size": size} if name.startswith(SIZED) else {})
    module: nn.Module = timm.create_model(
        name, pretrained=False, num_classes=10, drop_rate=0.0, **options
    )
    checkpoint = None
    if hasattr(module, "set_grad_checkpointing"):
        try:
            module.set_grad_checkpointing(True)
            module.set_grad_checkpointing(False)
            checkpoint = checkpointing
        except AssertionError:  # the method is there, and says that this one has none
            checkpoint = None
    return Model(without_chance(module), draws(size), classified, labels, checkpoint=checkpoint)


def checkpointing(module: Any) -> None:
    module.set_grad_checkpointing(True)


def build_torchvision(name: str, size: int) -> Model:
    import torchvision

    options = {"aux_logits": False, "init_weights": False} if name == "googlenet" else {}
    module = getattr(torchvision.models, name)(num_classes=10, **options)
    return Model(without_chance(module), draws(size), classified, labels)


for name, size in TIMM.items():
    REGISTRY.add(f"timm_{name}", "timm", packages=True)(
        lambda name=name, size=size: build_timm(name, size)
    )
for name, size in TORCHVISION.items():
    REGISTRY.add(f"torchvision_{name}", "torchvision", packages=True)(
        lambda name=name, size=size: build_torchvision(name, size)
    )
