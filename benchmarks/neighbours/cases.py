"""Networks of the benchmark, as MODEL functions: (module, inputs, loss, targets)."""

import torch

from dovetail.networks import NETWORKS


def mlp():
    """README's."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    inputs, targets = (torch.randn(32, 64),), (torch.randint(0, 10, (32,)),)
    return model, inputs, torch.nn.functional.cross_entropy, targets


def squeezenet():
    torch.manual_seed(0)
    return NETWORKS["squeezenet_1_1"].build(batch=1, size=160)


def vit():
    torch.manual_seed(0)
    return NETWORKS["vit"].build(**NETWORKS["vit"].small)
