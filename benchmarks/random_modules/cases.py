"""Cases: a random module, how it is trained or run, and the text that says all of it.

    adam float64 train 17: seq(linear, checkpoint(dropout, twice(mha)), batch-norm)
    optimizer, dtype, mode, seed of weights and inputs: the module

Modes: `train`, a training step; `tune`, one in evaluation mode; `infer`, outputs in evaluation
mode; `forward`, outputs in training mode.
"""

import random
import re
from dataclasses import dataclass, replace

import torch

from dovetail.frontends import SGD, Adam, AdamW, RMSProp

from . import parts, wrappers

# RMSProp and Adam divide by the gradient's size: where a gradient is 0 but for rounding, a float32
# step would be rounding only. Their eps is well above that.
OPTIMIZERS = {
    "sgd": (SGD(0.1), lambda p: torch.optim.SGD(p, 0.1, foreach=False)),
    "decayed": (
        SGD(0.1, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.01, foreach=False),
    ),
    "momentum": (
        SGD(0.05, momentum=0.9),
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, foreach=False),
    ),
    "nesterov": (
        SGD(0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
        lambda p: torch.optim.SGD(
            p, 0.05, momentum=0.9, nesterov=True, weight_decay=1e-3, foreach=False
        ),
    ),
    "rmsprop": (
        RMSProp(1e-2, eps=1e-3, momentum=0.5, centered=True, weight_decay=1e-2),
        lambda p: torch.optim.RMSprop(
            p, 1e-2, eps=1e-3, momentum=0.5, centered=True, weight_decay=1e-2, foreach=False
        ),
    ),
    "adam": (
        Adam(1e-2, eps=1e-3, weight_decay=1e-2),
        lambda p: torch.optim.Adam(p, 1e-2, eps=1e-3, weight_decay=1e-2, foreach=False),
    ),
    "adamw": (
        AdamW(1e-2, eps=1e-3),
        lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-3, foreach=False),
    ),
}
DTYPES = {"float64": torch.float64, "float32": torch.float32}
MODES = ("train", "tune", "infer", "forward")


# What may be refused, by parts that a case has. Everything else has to be captured.
WRITES = "it writes over a parameter in its forward pass"
STATE = "its state is no buffer, so nothing would carry it to the next step"
MEMORY = "one memory is registered under two names, or seen from outside the modules"
REFUSABLE = {
    "parameter-clamped": WRITES,
    "parameter-data-clamped": WRITES,
    "parameter-data-assigned": WRITES,
    "momentum-encoder": WRITES,
    "embedded-renormed": WRITES,
    "plain-state": STATE,
    "plain-state-assigned": STATE,
    "hidden-norm": STATE,
    "cache-of-parameter": STATE,
    "own-generator": STATE,
    "cached-function": STATE,
    "view-kept": MEMORY,
    "detached-kept": MEMORY,
    "data-kept": MEMORY,
    "buffer-of-parameter": MEMORY,
    "parameter-of-parameter": MEMORY,
    "aliased-buffers": MEMORY,
    "numpy-shared": MEMORY,
    "data-assigned": "it replaces a buffer's memory",
    "accumulated-hook": "it changes a gradient where only an optimizer of torch's would see it",
    "half-frozen": "it changes what is trained while it runs",
    "fake-quantised": "its scale is a number read from a buffer",
    "scripted": "TorchScript has no Python to run on fake tensors",
}
REFUSABLE_TOGETHER = {
    ("all-weight-normed", "parameters-in-list"): MEMORY,  # the new parameter keeps the old memory
    ("all-weight-normed", "tied"): MEMORY,
}


@dataclass(frozen=True)
class Node:
    """A leaf, or a wrapper of its children."""

    name: str
    children: tuple["Node", ...] = ()

    def __str__(self):
        inside = f"({', '.join(map(str, self.children))})" if self.children else ""
        return self.name + inside

    def names(self):
        """Of all nodes, in order."""
        return [self.name, *(name for child in self.children for name in child.names())]

    def build(self):
        if self.children:
            return wrappers.WRAPPERS[self.name]([child.build() for child in self.children])
        return parts.LEAVES[self.name]()


@dataclass(frozen=True)
class Case:
    optimizer: str
    dtype: str
    mode: str
    seed: int
    root: Node

    def __str__(self):
        return f"{self.optimizer} {self.dtype} {self.mode} {self.seed}: {self.root}"

    @property
    def trains(self):
        return self.mode in ("train", "tune")

    def build(self):
        """The module, of the default dtype, its weights drawn with the seed."""
        torch.manual_seed(self.seed)
        return self.root.build().train(self.mode in ("train", "forward"))

    def inputs(self, step):
        """(input, target) of a step."""
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        shape = (parts.ROWS, parts.WIDTH)
        return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def parse(text):
    """The case of a text. Raises `ValueError`."""
    head, _, body = text.partition(":")
    try:
        optimizer, dtype, mode, seed = head.split()
        tokens = re.findall(r"[\w-]+|[(),]", body)
        case = Case(optimizer, dtype, mode, int(seed), _node(tokens))
    except (ValueError, IndexError):
        raise ValueError(f"no case: {text!r}") from None
    if tokens or "".join(str(case).split()) != "".join(text.split()):
        raise ValueError(f"no case: {text!r}; as far as it is one, {str(case)!r}")
    return case


def _node(tokens):
    """Takes a node off the front of the tokens."""
    name, children = tokens.pop(0), []
    if tokens and tokens[0] == "(":
        while tokens.pop(0) in ("(", ","):
            children.append(_node(tokens))
    return Node(name, tuple(children))


def draw(seed, index, attempt=0):
    """Case `index` of a seed; where it is none that plain PyTorch can run, the next attempt."""
    rng = random.Random(f"{seed} {index} {attempt}")
    mode = rng.choices(MODES, (16, 1, 2, 1))[0]
    dtype = rng.choices(list(DTYPES), (5, 1))[0]
    root = Node("seq", tuple(_draw(rng, 2) for _ in range(rng.randint(1, 3))))
    return Case(rng.choice(list(OPTIMIZERS)), dtype, mode, rng.randrange(1 << 20), root)


def _draw(rng, depth):
    """A family first, so that families with many names are no more frequent."""
    if depth and rng.random() < 0.45:
        family = rng.choices(list(wrappers.FAMILIES), (2, 3, 5, 2, 1))[0]
        name = rng.choice(wrappers.FAMILIES[family])
        count = rng.choices((1, 2, 3), (3, 2, 1))[0]
        return Node(name, tuple(_draw(rng, depth - 1) for _ in range(count)))
    while True:
        name = rng.choice(parts.FAMILIES[rng.choice(list(parts.FAMILIES))])
        # A refusal hides what else is in a case, so that these are rarer.
        if name not in REFUSABLE or rng.random() < 0.1:
            return Node(name)


def smaller(case):
    """Cases with a part less, the simplest first."""
    for root in _smaller(case.root):
        yield replace(case, root=root)
    for field, simplest in (("optimizer", "sgd"), ("dtype", "float64"), ("mode", "train")):
        if getattr(case, field) != simplest:
            yield replace(case, **{field: simplest})


def _smaller(node):
    yield from node.children
    for i, child in enumerate(node.children):
        before, after = node.children[:i], node.children[i + 1 :]
        if before or after:
            yield Node(node.name, before + after)
        if child.children:
            yield Node(node.name, (*before, *child.children, *after))
        for less in _smaller(child):
            yield Node(node.name, (*before, less, *after))
