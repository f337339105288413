"""RandWire: image classifiers whose stages are wired at random.

    images ─► conv ─► conv ─► stage ─► stage ─► stage ─► conv 1x1 ─► pool ─► linear    (small)
    images ─► conv ─► stage ─► stage ─► stage ─► stage ─► conv 1x1 ─► pool ─► linear   (regular)

    stage:  input ─┬─► node 0 ──┬─► node 2 ─► ... ─► average of the nodes that no other reads
                   └─► node 1 ──┘
    node:   weighted sum ─► ReLU ─► separable conv 3x3 ─► batch normalisation

Paper: Xie, Kirillov, Girshick and He, "Exploring Randomly Wired Neural Networks for Image
Recognition", ICCV 2019, https://arxiv.org/abs/1904.01569, section 3 and table 1.

The graph of a stage is that of Watts and Strogatz, WS(K, P) = WS(4, .75). It begins as a ring of
N = 32 nodes, each joined to its K / 2 next and K / 2 last neighbours. Then there are K / 2 rounds.
Round i goes clockwise through the nodes v. With probability P the edge of v to its i-th next node
is replaced by one to a node drawn from those that are not v and not yet joined to v. At last every
edge is directed from the lower to the higher index in the ring, so that the graph has no cycle.

A node weighs its inputs by sigmoids of learned weights. A node without an input in the graph reads
the stage's input, with stride 2. The stage's output is the average of the nodes that no other node
reads.

Sizes: the small regime has C = 78 channels (tables 2 and 3: 5.6 M parameters, 583 M multiply-adds).
With `regular`, C is 109 (31.9 M, 4.0 G) or 154 (61.5 M, 7.9 G), and the first stage has N / 2
nodes. Every stage has a graph of its own. The graphs are drawn one after the other from `seed`.
Differences: a node with one input has no weight, because its normalisation would undo the weight;
no dropout and no smoothed labels.
"""

import random

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dovetail.networks.images import classification_loss, image_examples
from dovetail.networks.records import Network

HEAD = 1280
"""Channels of the 1x1 convolution before the classifier, from table 1 of the paper."""
Edges = list[tuple[int, int]]


def watts_strogatz(nodes: int, neighbours: int, probability: float, draws: random.Random) -> Edges:
    """Draws the graph WS(neighbours, probability): edges (lower, higher) in ascending order.

    There are nodes x neighbours / 2 edges, none of them twice. Raises `ValueError` unless the
    number of neighbours is even, above 0 and below the number of nodes.
    """
    if neighbours % 2 or not 0 < neighbours < nodes:
        raise ValueError(
            f"neighbours is {neighbours}, but must be even and between 0 and {nodes} nodes"
        )
    rounds = range(1, neighbours // 2 + 1)
    joined = [
        {(v + i) % nodes for i in rounds} | {(v - i) % nodes for i in rounds} for v in range(nodes)
    ]
    for i in rounds:
        for v in range(nodes):
            free = [w for w in range(nodes) if w != v and w not in joined[v]]
            if draws.random() >= probability or not free:
                continue
            old, new = (v + i) % nodes, free[draws.randrange(len(free))]
            joined[v].remove(old)
            joined[old].remove(v)
            joined[v].add(new)
            joined[new].add(v)
    return [(v, w) for v in range(nodes) for w in sorted(joined[v]) if v < w]


class RandWireNode(nn.Module):
    """Returns the weighted sum of `reads` inputs after a ReLU, a separable convolution and a batch
    normalisation."""

    def __init__(self, reads: int, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(reads)) if reads > 1 else None
        self.depthwise = nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False)
        self.pointwise = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.bn = nn.BatchNorm2d(outputs)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Returns [batch, outputs, n / stride, n / stride] of inputs [batch, inputs, n, n]."""
        x = inputs[0]
        if self.weights is not None:
            weights = torch.sigmoid(self.weights).unbind(0)
            x = x * weights[0]
            for weight, y in zip(weights[1:], inputs[1:], strict=True):
                x = x + y * weight
        y = self.pointwise(self.depthwise(F.relu(x)))
        transformed: Tensor = self.bn(y)
        return transformed


class WiredNodes(nn.Module):
    """Runs the nodes of one of the paper's stages, which halves the grid and returns `outputs`
    channels."""

    def __init__(self, nodes: int, edges: Edges, inputs: int, outputs: int) -> None:
        super().__init__()
        self.reads = tuple(tuple(v for v, w in edges if w == node) for node in range(nodes))
        self.last = sorted(set(range(nodes)) - {v for v, _ in edges})
        self.nodes = nn.ModuleList(
            RandWireNode(len(reads), outputs, outputs)
            if reads
            else RandWireNode(1, inputs, outputs, 2)
            for reads in self.reads
        )

    def forward(self, x: Tensor) -> Tensor:
        outputs: list[Tensor] = []
        for node, reads in zip(self.nodes, self.reads, strict=True):
            outputs.append(node(*(outputs[v] for v in reads)) if reads else node(x))
        first, *further = (outputs[v] for v in self.last)
        for other in further:
            first = first + other
        return first / len(self.last)


class RandWire(nn.Module):
    """Maps images [batch, 3, size, size] to logits [batch, classes].

    nodes, channels   both even
    rewired           probability P that an edge of the ring is rewired

    Raises `ValueError` if `rewired` is no probability, and as `watts_strogatz` does.
    """

    def __init__(
        self,
        *,
        nodes: int,
        neighbours: int,
        rewired: float,
        channels: int,
        regular: bool,
        seed: int,
        classes: int,
    ) -> None:
        super().__init__()
        if not 0 <= rewired <= 1:
            raise ValueError(f"rewired is {rewired}, but is a probability")
        draws = random.Random(seed)
        half = channels // 2
        stem: list[nn.Module] = [nn.Conv2d(3, half, 3, 2, 1, bias=False), nn.BatchNorm2d(half)]
        if regular:
            inputs, sizes = half, [(nodes // 2, 1), (nodes, 2), (nodes, 4), (nodes, 8)]
        else:
            stem += [nn.ReLU(), nn.Conv2d(half, channels, 3, 2, 1, bias=False)]
            stem += [nn.BatchNorm2d(channels)]
            inputs, sizes = channels, [(nodes, 1), (nodes, 2), (nodes, 4)]
        self.stem = nn.Sequential(*stem)
        stages = []
        for many, factor in sizes:
            edges = watts_strogatz(many, neighbours, rewired, draws)
            stages.append(WiredNodes(many, edges, inputs, factor * channels))
            inputs = factor * channels
        self.stages = nn.Sequential(*stages)
        self.head = nn.Sequential(
            nn.ReLU(), nn.Conv2d(inputs, HEAD, 1, bias=False), nn.BatchNorm2d(HEAD), nn.ReLU()
        )
        self.linear = nn.Linear(HEAD, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.head(self.stages(self.stem(images)))
        logits: Tensor = self.linear(torch.flatten(F.adaptive_avg_pool2d(x, (1, 1)), 1))
        return logits


NETWORK = Network(
    name="randwire",
    paper="Xie et al., ICCV 2019, https://arxiv.org/abs/1904.01569",
    description="image classifier wired at random by Watts and Strogatz's model",
    defaults={
        "batch": 32,
        "size": 224,
        "classes": 1000,
        "nodes": 32,
        "neighbours": 4,
        "rewired": 0.75,
        "channels": 78,
        "regular": False,
        "seed": 1,
    },
    small={"batch": 2, "size": 64, "classes": 10, "nodes": 8, "channels": 4},
    modules=RandWire,
    examples=image_examples,
    loss=classification_loss,
)
