"""What models of transformers, and wrappers around a module, need before they are captured.

transformers is not imported here: what its models are is told by the attributes they have.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

BATCHED = "batched_mm"
"""transformers' implementation of experts by one batched product over (token, expert) pairs. Its
other ones count tokens per expert, so that shapes depend on data, or call kernels that exist for
bfloat16 alone."""
FOLLOWS_DATA = ("eager", "grouped_mm")


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside of `nn.DataParallel` and `DistributedDataParallel`: placement replaces what
    they do, and their copies of the module cannot be captured."""
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while isinstance(model, wrappers):
        model = model.module
    return model


@contextmanager
def batched_experts(model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Within it, mixtures of experts of transformers compute by their batched implementation.

    Yields one note where something was switched, else (). Afterwards the model is as before. An
    implementation that somebody chose and that can be captured is left alone, and a model without
    a batched one (older releases, experts in a loop) is too: its capture says what it fails at.
    """
    configs: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        # `_apply_gate` marks the experts of `transformers.integrations.moe`.
        if hasattr(module, "_apply_gate") and (
            getattr(config, "_experts_implementation", None) in FOLLOWS_DATA
        ):
            configs[id(config)] = config
    before = [(config, config._experts_implementation) for config in configs.values()]
    try:
        for config, _ in before:
            config._experts_implementation = BATCHED
        names = " and ".join(sorted({repr(name) for _, name in before}))
        note = (
            f"experts are computed by transformers' {BATCHED!r} instead of {names}, whose shapes "
            "depend on data: the same numbers but for rounding"
        )
        yield (note,) if before else ()
    finally:
        for config, name in before:
            config._experts_implementation = name
