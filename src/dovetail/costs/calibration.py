"""Calibrates analytic costs on the devices that are here.

A small network has each class of kernels in a few sizes: products, convolutions, attention,
normalisations, and with its backward pass and Adam's update some sixty kinds of ops. They are
measured as `costs.measured` measures any op, and the median of what a class takes over what it
should take becomes its factor in `Device.calibration`.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from dovetail.costs.analytic import analytic_costs
from dovetail.costs.cache import CostCache
from dovetail.costs.kernels import MOVES_NOTHING, kernels_of
from dovetail.costs.measured import measured_costs
from dovetail.frontends import capture
from dovetail.machine import Machine


class _Sample(nn.Module):
    """Convolutions over images, and a Transformer's layer over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(16, 64, 3, padding=1), nn.Conv2d(64, 128, 1)
        self.apart = nn.Conv2d(128, 128, 3, padding=1, groups=128)
        self.normal, self.layer_normal = nn.BatchNorm2d(64), nn.LayerNorm(256)
        self.embedding, self.three = nn.Embedding(2000, 256), nn.Linear(256, 768)
        self.wide, self.narrow = nn.Linear(256, 1024), nn.Linear(1024, 256)
        self.of_image, self.of_tokens = nn.Linear(128, 100), nn.Linear(256, 100)

    def forward(self, images: Tensor, ids: Tensor, classes: Tensor) -> Tensor:
        x = functional.relu(self.normal(self.first(images)))
        x = self.apart(functional.relu(self.second(x)))
        x = functional.max_pool2d(x, 2).mean((2, 3))
        t = self.layer_normal(self.embedding(ids))
        query, key, value = (
            part.unflatten(2, (4, 64)).transpose(1, 2) for part in self.three(t).chunk(3, 2)
        )
        t = t + functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(
            2
        )
        weights = torch.softmax(torch.matmul(query, key.transpose(2, 3)) / 8, 3)
        t = t + torch.matmul(weights, value).transpose(1, 2).flatten(2)
        t = t + self.narrow(functional.gelu(self.wide(t)))
        return functional.cross_entropy(self.of_image(x) + self.of_tokens(t.mean(1)), classes)


def calibrated(
    machine: Machine,
    cache: CostCache,
    *,
    progress: Callable[[float], None] = lambda _fraction: None,
    beside: Callable[[float], None] = lambda _cores: None,
) -> Machine:
    """Return the machine with factors of its devices' classes of kernels. It takes about half a
    minute.

    machine   this one, with rates that were measured
    beside    as in `measured_costs`

    Raises what measuring raises.
    """
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(8, 16, 28, 28, generator=generator)
    ids = torch.randint(2000, (8, 128), generator=generator)
    classes = torch.randint(100, (8,), generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sample = _Sample()
    step = capture(sample, images, ids, classes, train="adam:lr=1e-3")
    graph = step.graph
    found = measured_costs(graph, step.program, machine, cache, progress=progress, beside=beside)
    bare = replace(machine, devices=tuple(replace(d, calibration={}) for d in machine.devices))
    expected, kernels = analytic_costs(graph, bare).compute_seconds, kernels_of(graph)
    devices = []
    for d, device in enumerate(bare.devices):
        ratios: dict[str, list[float]] = defaultdict(list)
        overhead = device.op_overhead_seconds
        for kernel, op in enumerate(np.unique(kernels.of_op, return_index=True)[1].tolist()):
            name = str(kernels.classes[kernel])
            work, spent = expected[op, d] - overhead, found.compute_seconds[op, d] - overhead
            # Where the overhead is most of it, the rest is noise.
            if name != MOVES_NOTHING and np.isfinite(spent) and work > overhead / 4:
                ratios[name].append(max(spent, 0.05 * work) / work)
        factors = {name: float(f"{np.median(of):.3g}") for name, of in sorted(ratios.items())}
        devices.append(replace(device, calibration=factors))
    return replace(machine, devices=tuple(devices))
