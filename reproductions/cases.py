"""The rows of the papers' tables: network, optimizer, machine, and the figures as printed.

Papers: Mirhoseini et al., "Device Placement Optimization with Reinforcement Learning", ICML 2017,
https://arxiv.org/abs/1706.04972, tables 1 and 2 and section 4.4 (`RL17_CASES`); Zhou et al.,
"GDP: Generalized Device Placement for Dataflow Graphs", 2019, https://arxiv.org/abs/1910.01578,
table 1 (`GDP_CASES`).

Sizes that a paper leaves out are ours, and `Case.ours` says which they are and where we took them
from. RL17 prints the seconds of 1 CPU and 1 GPU once a network, for all machines; here every row of
the network has both.
"""

from collections.abc import Mapping
from dataclasses import replace

from dovetail.machine import Machine, parse_machine
from dovetail.units import format_bytes
from reproductions.records import Case, Published

RL17_COLUMNS = ("1 CPU", "1 GPU", "Scotch", "MinCut", "expert", "RL")
GDP_COLUMNS = ("GDP-one", "human", "METIS", "HDP")
"""The columns of GDP's table, in its order; None in a row stands for OOM."""

_VOCABULARY = "vocabulary 10,000: that of the Penn Treebank in Zaremba et al., 2014"
_ATTENTION = "who reads the attention, and what it reads: as in Bahdanau et al., 2015"
_LARGE = (
    "The paper has no table of it: by its text no layer fits into one device, which leaves neither "
    "one GPU nor the expert's placement. "
)
_UNGIVEN = "GDP gives no sizes and no optimizer: "


def _rl17(
    network: str,
    title: str,
    model: str,
    train: str,
    published: Published,
    seconds: Mapping[int, tuple[float | None, ...]],
    ours: str = "",
) -> list[Case]:
    """The rows of one network, one for each number of GPUs. `published` holds the figures that they
    have in common; `seconds` holds, by number of GPUs, the columns from Scotch on, if any."""
    return [
        Case(
            f"{network}-{gpus}gpu", f"{title}, {gpus} GPUs", model, train, f"rl17/{gpus}", gpus,
            replace(
                published,
                seconds={**published.seconds, **dict(zip(RL17_COLUMNS[2:], more, strict=False))},
            ),
            ours,
        )
        for gpus, more in seconds.items()
    ]  # fmt: skip


_RL17_ROWS: tuple[Case, ...] = (
    *_rl17(
        "rnnlm", "RNNLM", "zoo:rnnlm?layers=2&hidden=2048&steps=40&batch=64", "adam",
        Published({"1 CPU": 6.89, "1 GPU": 1.57}, ops=8943, groups=188),
        {2: (13.43, 11.94, 3.81, 1.57), 4: (11.52, 10.44, 4.46, 1.57)}, _VOCABULARY,
    ),
    *_rl17(
        "nmt", "NMT", "zoo:nmt", "adam",
        Published({"1 CPU": 10.72, "1 GPU": None}, ops=22097, groups=280),
        {2: (14.19, 11.54, 4.99, 4.04), 4: (11.23, 11.78, 4.73, 3.92)}, _ATTENTION,
    ),
    *_rl17(
        "inception-v3", "Inception-V3", "zoo:inception_v3?batch=32", "rmsprop",
        Published({"1 CPU": 26.21, "1 GPU": 4.60}, ops=31180, groups=83),
        {2: (25.24, 22.88, 11.22, 4.60), 4: (23.41, 24.52, 10.65, 3.85)},
    ),
    *_rl17(
        "rnnlm-large", "RNNLM, batch 256, 4096 wide",
        "zoo:rnnlm?layers=2&hidden=4096&steps=40&batch=256", "adam",
        Published({"1 GPU": None, "expert": None, "RL": 33.46}), {4: ()}, _LARGE + _VOCABULARY,
    ),
    *_rl17(
        "nmt-large", "NMT, batch 256, 2048 wide", "zoo:nmt?hidden=2048&batch=256", "adam",
        Published({"1 GPU": None, "expert": None, "RL": 35.84}), {4: ()}, _LARGE + _ATTENTION,
    ),
)  # fmt: skip

# ---- Rows of ours with little memory, where neither one GPU nor the expert's placement fits ----
#
# The paper's large variants are like that, but by our count its sizes fit. So each network on 4
# GPUs stands once more with as much memory a GPU as `methods.tight_bytes` says of its graph.
# `benchmarks/rl17/tight.py` computes these figures anew.

TIGHT_BYTES: dict[str, int] = {
    "rnnlm-4gpu": 1_248_580_245,
    "nmt-4gpu": 2_045_630_408,
    "inception-v3-4gpu": 1_780_295_472,
    "rnnlm-large-4gpu": 4_880_524_744,
    "nmt-large-4gpu": 9_319_466_235,
}
"""Maps the key of a row to the memory of a GPU in the same row with little of it."""


def _tight(case: Case, gpu_memory_bytes: int) -> Case:
    """The case with that much memory a GPU. The paper has no figures for it."""
    sizes = case.ours.removeprefix(_LARGE)
    return replace(
        case,
        key=case.key.replace("-4gpu", "-tight-4gpu"),
        title=f"{case.title} of {format_bytes(gpu_memory_bytes)}",
        published=None,
        ours="The whole row is ours: the memory of each GPU is nine tenths of the least that the "
        "expert's placement needs on its fullest GPU, so neither that nor one GPU fits"
        + (f". Of its sizes: {sizes}" if sizes else ""),
        gpu_memory_bytes=gpu_memory_bytes,
    )


RL17_CASES: tuple[Case, ...] = (
    *_RL17_ROWS,
    *(_tight(case, TIGHT_BYTES[case.key]) for case in _RL17_ROWS if case.key in TIGHT_BYTES),
)


def machine_of(case: Case) -> Machine:
    """The machine of a row, with the row's own memory of a GPU if it has one."""
    machine = parse_machine(case.machine)
    if case.gpu_memory_bytes is None:
        return machine
    return with_gpu_memory(machine, case.gpu_memory_bytes)


def with_gpu_memory(machine: Machine, memory_bytes: int) -> Machine:
    """The machine with that much memory on each GPU."""
    devices = tuple(
        replace(device, memory_bytes=memory_bytes) if device.kind == "gpu" else device
        for device in machine.devices
    )
    return replace(machine, devices=devices)


def _gdp(  # noqa: PLR0917  one argument a column of the table
    network: str,
    title: str,
    model: str,
    train: str,
    gpus: int,
    seconds: tuple[float | None, ...],
    faster: str,
    ours: str,
) -> Case:
    """A row of GDP's table. faster: how many times less time GDP-one's search takes than HDP's."""
    published = Published(
        dict(zip(GDP_COLUMNS, seconds, strict=True)),
        hours={"GDP-one": f"{faster} times faster than HDP"},
    )
    title, key = f"{title}, {gpus} GPUs", f"{network}-{gpus}gpu"
    return Case(key, title, model, train, f"gdp/{gpus}", gpus, published, _UNGIVEN + ours)


_RNNLM = f"2048 wide, 40 steps, batch 64 and Adam as in RL17; {_VOCABULARY}"
_GNMT = (
    "1024 wide, batch 128, 32,000 word pieces as in its own paper (Wu et al., 2016), which begins "
    "with Adam; 40 + 40 steps as RL17's NMT"
)
_XL = (
    "those of the 12-layer model of enwik8 in its own paper (Dai et al., 2019: 512 wide, 8 heads, "
    "inner 2048, Adam), with segments and memory of 512 and batch 22 from its authors' script"
)
_INCEPTION = "batch 32 and RMSProp as in RL17"
_AMOEBANET = (
    "18 layers, 208 filters as in Huang et al., 2019; RMSProp as in its own paper (Real et al., "
    "2019); images of 224 and batch 32 are our choice"
)
_WAVENET = (
    "64 residual, 64 gated and 256 skip channels as in Arik et al., 2017; clips of 7,680 samples "
    "and Adam as in van den Oord et al., 2017; 8 clips a batch and dilations that begin again "
    "after 9 layers are our choice. The layers are read as those of one stack"
)

GDP_CASES: tuple[Case, ...] = (
    _gdp(
        "rnnlm-2", "RNNLM-2", "zoo:rnnlm?layers=2", "adam", 2,
        (0.234, 0.257, 0.355, 0.243), "2.95", _RNNLM,
    ),
    _gdp(
        "rnnlm-4", "RNNLM-4", "zoo:rnnlm?layers=4", "adam", 4,
        (0.409, 0.480, None, 0.490), "1.76", _RNNLM,
    ),
    _gdp(
        "gnmt-2", "GNMT-2", "zoo:gnmt?layers=2", "adam", 2,
        (0.301, 0.384, None, 0.376), "30", _GNMT,
    ),
    _gdp(
        "gnmt-4", "GNMT-4", "zoo:gnmt?layers=4", "adam", 4,
        (0.409, 0.469, None, 0.520), "58.8", _GNMT,
    ),
    _gdp(
        "gnmt-8", "GNMT-8", "zoo:gnmt?layers=8", "adam", 8,
        (0.649, 0.610, None, 0.693), "7.35", _GNMT + ". The paper counts more than 60,000 ops",
    ),
    _gdp(
        "transformer-xl-2", "Transformer-XL-2", "zoo:transformer_xl?layers=2", "adam", 2,
        (0.386, 0.473, None, 0.435), "40", _XL,
    ),
    _gdp(
        "transformer-xl-4", "Transformer-XL-4", "zoo:transformer_xl?layers=4", "adam", 4,
        (0.580, 0.641, None, 0.621), "26.7", _XL,
    ),
    _gdp(
        "transformer-xl-8", "Transformer-XL-8", "zoo:transformer_xl?layers=8", "adam", 8,
        (0.748, 0.813, None, 0.789), "16.7", _XL,
    ),
    _gdp(
        "inception", "Inception", "zoo:inception_v3?batch=32", "rmsprop", 2,
        (0.405, 0.418, 0.423, 0.417), "13.5", _INCEPTION,
    ),
    _gdp(
        "amoebanet", "AmoebaNet", "zoo:amoebanet_d", "rmsprop", 4,
        (0.394, 0.440, 0.426, 0.418), "58.8", _AMOEBANET,
    ),
    _gdp(
        "wavenet-2x18", "WaveNet, 2 stacks of 18", "zoo:wavenet?stacks=2&layers=18", "adam", 2,
        (0.317, 0.376, None, 0.354), "6.67", _WAVENET,
    ),
    _gdp(
        "wavenet-4x36", "WaveNet, 4 stacks of 36", "zoo:wavenet?stacks=4&layers=36", "adam", 4,
        (0.659, 0.988, None, 0.721), "20", _WAVENET,
    ),
)  # fmt: skip

CASES: dict[str, tuple[Case, ...]] = {"rl17": RL17_CASES, "gdp": GDP_CASES}

METHOD_OF: dict[str, str] = {
    "1 CPU": "1 CPU",
    "1 GPU": "1 GPU",
    "Scotch": "scotch",
    "MinCut": "mincut",
    "METIS": "metis",
    "expert": "expert",
    "human": "expert",
    "RL": "seq2seq",
    "HDP": "hdp",
    "GDP-one": "gdp",
}
"""Maps each column of a paper to our method."""

AS_PUBLISHED: dict[str, str] = {
    "seq2seq": "seq2seq-paper",
    "gdp": "gdp-paper",
    "hdp": "hdp-paper",
}
"""Maps each method of ours that learns to the same as its paper has it. A row has both."""

LIKELIEST, PROPOSALS = "likeliest", "proposals"
"""What the shipped policy comes to without training on the row: by the one placement that it thinks
likeliest, and by the best of all that it proposes (`placers.learned.placing.proposals`)."""

AUTO_ON: dict[str, str] = {
    f"auto@{method}": method for method in ("seq2seq", "seq2seq-paper", "gdp", "gdp-paper")
}
"""Maps "auto@gdp" to "gdp": `auto`, which does not learn, on the groups of that method (and so of
`hdp`), with as many evaluations and as many seeds."""

LEARNED: dict[str, tuple[str, ...]] = {
    "rl17": ("seq2seq", "auto@seq2seq", "seq2seq-paper", "auto@seq2seq-paper"),
    "gdp": (
        "gdp", "auto@gdp", "gdp-paper", "auto@gdp-paper", "hdp", "hdp-paper", LIKELIEST, PROPOSALS,
    ),
}  # fmt: skip
"""Maps each table to its methods that learn, and what is compared with them. Their budget is one of
their own: trials and seeds."""
