"""Tables of a few tiny rows."""

from reproductions.methods import HYPOTHESIS, PLAIN
from reproductions.records import Case
from reproductions.running import BenchSettings

MACHINE = "2 x k80 + haswell"
RNN = "zoo:rnnlm?hidden=16&steps=4&batch=3&vocabulary=50"
CASES = tuple(
    Case(f"tiny-{n}gpu", f"Tiny, {n} GPUs", RNN, "adam", f"{n} x k80 + haswell", n, None)
    for n in (2, 4)
)
FEW = {PLAIN: ("1 CPU", "expert", "heft", "local_search"), HYPOTHESIS: ("1 GPU", "expert", "metis")}


def settings(folder, **changes):
    return BenchSettings(
        **{"name": "rl17", "out": folder, "budget": "60e", "methods": FEW} | changes
    )
