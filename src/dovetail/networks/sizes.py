"""How large the networks are at their default options, from a table that captures made.

python benchmarks/capture/run.py --write
"""

import json
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True)
class Sizes:
    """Of a network at its defaults.

    flops                of one inference, 2 a multiply-add
    ops, training_ops    of one inference and of one training step, sources apart
    """

    parameters: int
    parameter_bytes: int
    flops: int
    ops: int
    training_ops: int


def load_sizes() -> dict[str, Sizes]:
    """network -> its sizes. A network that was not captured yet is absent."""
    text = resources.files("dovetail.networks").joinpath("sizes.json").read_text("utf-8")
    return {name: Sizes(**row) for name, row in json.loads(text).items()}
