"""Computes the tables of DOS: schedules of four networks on one device, and elsewhere.

    row ──► elsewhere.compare ──► lines of figures ──► OUT/rows/ROW.json
     │                                                 (what `dos_page` shows)
     ├─ table5.NETWORK.DEVICE   sequential, greedy, merge, dos and ios at batch 1; random schedules
     │                          (figure 7); speed-ups of the parts of the network
     ├─ table1.NETWORK          the `dos` schedule made for each device, on every device
     └─ table2.NETWORK.DEVICE   the `dos` schedule made for each batch size, at every batch size;
                                speed-ups over batch sizes (figure 6)

Paper: "Accelerate DNN Inference by Inter-Operator Parallelism" (DOS), 2019,
https://openreview.net/forum?id=HJezqlrKvr. Its text could not be read; its figures here come from
excerpts. The figures of its successor (Y. Ding et al., "IOS: Inter-Operator Scheduler for CNN
Acceleration", MLSys 2021) are those of the README of its authors' code,
https://github.com/mit-han-lab/inter-operator-scheduler, commit 492167c.

Differences: `cpu` and `cuda:N` are measured, any other device is predicted by analytic costs, and
every line says which. What the paper's columns of TensorFlow and TVM say is not known, and IOS's
stand in their place. SqueezeNet is 1.0 without bypasses, which has fewer multiply-adds than theirs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dovetail.errors import UsageError
from dovetail.executors.stages.preparing import require
from dovetail.machine.local import local_machine
from dovetail.pipeline.requests import CPU, is_cuda, runs_here
from dovetail.pipeline.scheduling import one_device
from dovetail.reports.schedules import launches_of, measured_of
from dovetail.schedulers.results import SEQUENTIAL
from reproductions.additivity import noise_of
from reproductions.elsewhere import Comparison, ComparisonRequest, compare
from reproductions.store import SCHEDULED, Kept, Store, fingerprint
from reproductions.tasks import BenchTask, matching, run_missing

DOS = "dos"
TABLE5, TABLE1, TABLE2 = "table5", "table1", "table2"
SCHEDULERS_OF = {
    TABLE5: ("greedy", "merge", DOS, "ios"),
    TABLE1: (DOS,),
    TABLE2: ("greedy", "merge", DOS),
}
"""What is searched with for each table, beside `sequential`."""
PAPER_DEVICES = ("titan_xp", "v100", "2080ti")
"""The devices of the paper's table 1, in its order, as presets."""
PAPER_BATCHES = (1, 8, 16)
"""The batch sizes of the paper's table 2."""


@dataclass(frozen=True)
class DosNetwork:
    """A network of the paper: its name there, and the MODEL text of ours."""

    title: str
    model: str

    def sized(self, size: int | None) -> str:
        """The MODEL text with images of another side; None: the network's own."""
        if size is None:
            return self.model
        return f"{self.model}{'&' if '?' in self.model else '?'}size={size}"


NETWORKS = {
    "squeezenet": DosNetwork("SqueezeNet", "zoo:squeezenet_1_0"),
    "inception-v3": DosNetwork("InceptionV3", "zoo:inception_v3"),
    "randwire": DosNetwork("RandWire", "zoo:randwire?regular=true&channels=150"),
    "nasnet-a": DosNetwork("NasNet-A", "zoo:nasnet_a_large"),
}
"""RandWire and NasNet-A have the sizes whose multiply-adds come nearest to those that DOS prints.
Their order is that of the time that measuring them takes, the shortest first."""
TOO_LONG = ("randwire", "nasnet-a")
"""The networks for which `ios` is left out where stages are measured: it asks for many more of them
than `dos` does. Half an hour measured 4,000 of RandWire's, and was not done."""
SPECIALISED = ("squeezenet", "inception-v3")
"""The networks of tables 1 and 2: the paper's is InceptionV3. SqueezeNet takes minutes less."""


# ---- What the papers print ----

PUBLISHED_DOS = {
    "squeezenet": {DOS: 0.74, "TensorRT": 0.84},
    "inception-v3": {DOS: 4.61, "TensorRT": 5.11},
    "randwire": {DOS: 7.15, "TensorRT": 8.91},
    "nasnet-a": {DOS: 18.99, "TensorRT": 23.58},
}
"""Network -> column -> milliseconds on a V100 at batch 1: DOS, table 5."""
PUBLISHED_IOS = {
    "squeezenet": {
        SEQUENTIAL: 0.86, "greedy": 0.98, "merge": 0.74, "ios": 0.73, "TensorFlow": 2.63,
        "TVM": 0.90, "TensorRT": 0.80,
    },
    "inception-v3": {
        SEQUENTIAL: 6.51, "greedy": 4.62, "merge": 5.39, "ios": 4.03, "TensorFlow": 7.95,
        "TVM": 4.88, "TensorRT": 5.21,
    },
    "randwire": {
        SEQUENTIAL: 8.49, "greedy": 6.27, "merge": 8.54, "ios": 6.02, "TensorFlow": 12.06,
        "TVM": 6.86, "TensorRT": 8.33,
    },
    "nasnet-a": {
        SEQUENTIAL: 22.95, "greedy": 16.78, "merge": 22.94, "ios": 16.04, "TensorFlow": 24.73,
        "TVM": 26.87, "TensorRT": 24.66,
    },
}  # fmt: skip
"""The same of the README of IOS's code, sections 4.2.1 and 4.2.2. `ios` is its "IOS-Both", `merge`
its "IOS-Merge", and TVM runs cuDNN's convolutions."""
PUBLISHED_TABLE1 = {
    "titan_xp": {"titan_xp": 6.01, "v100": 6.27, "2080ti": 6.27},
    "v100": {"titan_xp": 4.86, "v100": 4.65, "2080ti": 5.08},
    "2080ti": {"titan_xp": 4.33, "v100": 4.43, "2080ti": 4.09},
}
"""Device -> the device that the schedule was made for -> milliseconds of InceptionV3."""
PUBLISHED_TABLE2 = {
    1: {1: 4.66, 8: 4.73, 16: 5.09},
    8: {1: 10.98, 8: 10.55, 16: 10.96},
    16: {1: 17.43, 8: 16.94, 16: 16.56},
}
"""Batch size -> the size that the schedule was made for -> milliseconds of InceptionV3."""


@dataclass(frozen=True)
class PublishedWork:
    """What DOS prints of its schedule: kernels, thousand millions of multiply-adds, megabytes of
    memory access, million millions of multiply-adds a second, and seconds of the search."""

    kernels: int
    multiply_adds: float
    moved: float
    utilisation: float
    search_seconds: float


PUBLISHED_WORK = {
    "squeezenet": PublishedWork(38, 1.16, 48, 1.69, 4),
    "inception-v3": PublishedWork(103, 5.50, 68, 1.19, 10),
    "randwire": PublishedWork(406, 7.67, 576, 1.07, 480),
    "nasnet-a": PublishedWork(965, 22.00, 1187, 1.16, 180),
}
OTHER_SIZE = (
    "The images are not of the networks' own size: seconds can be compared with each other, and "
    "not with the papers'."
)
PUBLISHED_PAIRS = 0.937
"""Figure 7: the share of all pairs of random schedules whose order was predicted right."""


# ---- Rows ----


@dataclass(frozen=True)
class DosRow:
    """What is computed and kept at once. `device` is "" for table 1, which has all devices."""

    table: str
    network: str
    device: str = ""

    @property
    def key(self) -> str:
        return ".".join(filter(None, (self.table, self.network, self.device.replace(":", "-"))))


@dataclass(frozen=True)
class DosSettings:
    """What is asked for. Raises `UsageError`, or `MachineError` for an unknown device.

    devices   as in `ComparisonRequest`; table 1 has those of the paper as well
    batches   of table 2 and figure 6. All else has batch 1
    rounds    of measuring
    sampled   random schedules of a network, for figure 7; 0: none
    size      side of the images in pixels; None: each network's own
    """

    out: Path
    devices: tuple[str, ...] = (CPU, "v100")
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    rounds: int = 15
    sampled: int = 100
    size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.devices:
            raise UsageError("--device", "name one, such as cpu")
        for device in self.devices:
            if is_cuda(device):
                require(torch.cuda, device)
            elif device != CPU:
                one_device(device)

    @property
    def rows(self) -> list[DosRow]:
        """Every row. Those of table 5 come first, because the others reuse their stage costs."""
        rows = [DosRow(TABLE5, network, d) for network in NETWORKS for d in self.devices]
        rows += [DosRow(TABLE1, network) for network in SPECIALISED]
        rows += [DosRow(TABLE2, network, d) for network in SPECIALISED for d in self.devices]
        return rows

    def request(self, row: DosRow) -> ComparisonRequest:
        """The request whose schedules the row shows."""
        measured = row.table == TABLE5 and runs_here(row.device)
        schedulers = SCHEDULERS_OF[row.table]
        if measured and row.network in TOO_LONG:
            schedulers = tuple(name for name in schedulers if name != "ios")
        return ComparisonRequest(
            NETWORKS[row.network].sized(self.size),
            (row.device,) if row.device else tuple(dict.fromkeys((*self.devices, *PAPER_DEVICES))),
            schedulers,
            self.batches if row.table == TABLE2 else (1,),
            self.rounds,
            self.seed,
            sampled=self.sampled if measured else 0,
            specialised=DOS,
        )

    def kept(self, store: Store, row: DosRow) -> Kept:
        """The place of a row's lines in the store."""
        request = self.request(row)
        keys = []
        for device in request.devices:
            # Where a device is measured it is the device itself, so that another machine's figures
            # do not count.
            if is_cuda(device):
                keys.append(torch.cuda.get_device_name(device))
            elif device == CPU:
                here = local_machine().devices[0]
                keys.append(f"{here.model}, {len(here.cores)} threads")
            else:
                keys.append(device)
        return Kept(
            store,
            row.key,
            fingerprint(
                SCHEDULED,
                model=request.model,
                devices=keys,
                schedulers=request.schedulers,
                batches=request.batches,
                rounds=request.rounds,
                sampled=request.sampled,
                seed=request.seed,
            ),
        )


@dataclass(frozen=True)
class DosTables:
    """The lines of all rows that are done, and row -> error or traceback of those that failed.

    computed   number of rows that this call ran; 0: everything was kept from before
    missing    keys of the rows that are not done
    """

    lines: list[dict[str, str]]
    failures: dict[str, str]
    computed: int
    missing: list[str]


def run_rows(
    settings: DosSettings,
    *,
    rows: str = "",
    fresh: bool = False,
    tell: Callable[[str, float], None] = lambda _text, _fraction: None,
    complain: Callable[[str], None] = lambda _text: None,
) -> DosTables:
    """Compute what is missing of the rows that `rows` names, and read all rows back.

    fresh   forget first what is kept of those rows
    tell    is called with (what is being done, share of the rows that are done)

    Everything runs in this process, one row after another, because what is measured needs the
    machine for itself. Raises `UsageError` if `rows` names none.
    """
    selected = matching(settings.rows, rows)
    store = Store(settings.out / "rows", complain)
    for row in selected if fresh else ():
        store.drop(row.key)
    tasks = [
        BenchTask(row.key, "reproductions.dos:run_row", (settings, row))
        for row in selected
        if settings.kept(store, row).get() is None
    ]
    failures = run_missing(
        tasks, len(selected), 0, lambda task, text, share: tell(f"{task}: {text}", share), complain
    )
    kept = {row.key: settings.kept(store, row).get() for row in settings.rows}
    return DosTables(
        [line for lines in kept.values() for line in lines or ()],
        failures,
        len(tasks),
        [key for key, lines in kept.items() if lines is None],
    )


def run_row(
    settings: DosSettings,
    row: DosRow,
    tell: Callable[[str], None],
    complain: Callable[[str], None],
) -> list[str]:
    """Compute one row and keep its lines. A `BenchTask`: it returns no failures of its own."""
    found = compare(settings.request(row), progress=lambda doing, *_: tell(doing))
    size = {} if settings.size is None else {"size": str(settings.size)}
    lines = [line | size for line in _lines(settings, row, found)]
    settings.kept(Store(settings.out / "rows", complain), row).put(lines)
    return []


# ---- Lines: flat records of text, as they stand in the CSV file ----

MEASURED, PREDICTED = "measured", "predicted"
SCHEDULE, ELSEWHERE, SAMPLE, BLOCK = "schedule", "elsewhere", "sample", "block"
FIELDS = (
    "row", "kind", "network", "size", "device", "name", "source", "batch", "scheduler", "chosen",
    "made_for", "block", "seconds", "predicted_seconds", "spread", "rounds", "kernels", "launches",
    "multiply_adds", "moved_bytes", "states", "timed", "search_seconds", "measuring_seconds",
)  # fmt: skip
"""The fields of a line. `kind` says what the line is of:

    schedule    one scheduler's schedule. `seconds` of a step, measured or predicted by `source`;
                `spread`: interquartile range over median of its rounds
    elsewhere   the `dos` schedule made for the device or batch size `made_for`, run on `device` at
                `batch`
    sample      a random schedule; `spread` is the noise of the row's measurements
    block       predicted seconds of one part of the network, by one scheduler

`size` is the side of the images in pixels if they are not of the network's own size. `device` is as
it was asked for, and `name` the device's own."""


def _lines(settings: DosSettings, row: DosRow, found: list[Comparison]) -> Iterator[dict[str, str]]:
    def line(kind: str, **values: Any) -> dict[str, str]:
        given = {"row": row.key, "network": row.network, "kind": kind, **values}
        assert given.keys() <= set(FIELDS), "a field that the file does not have"
        return {name: str(given[name]) for name in FIELDS if given.get(name) is not None}

    def source(device: str) -> str:
        return MEASURED if runs_here(device) else PREDICTED

    if row.table == TABLE1:
        # There is one batch size, so the only matrix is that of the devices, the same on each.
        devices, (matrix,) = settings.request(row).devices, found[0].specialisations
        for device, name, of_row in zip(devices, matrix.rows, matrix.seconds, strict=True):
            for made_for, seconds in zip(devices, of_row, strict=True):
                yield line(
                    ELSEWHERE, device=device, name=name, source=source(device),
                    batch=found[0].schedules.results[0].batch, scheduler=DOS, made_for=made_for,
                    seconds=seconds,
                )  # fmt: skip
        return
    (comparison,) = found
    on_device = comparison.schedules
    of_device = partial(line, device=row.device, name=on_device.device)
    for result in on_device.results:
        for candidate in result.candidates:
            timing, effort = measured_of(candidate), candidate.effort
            yield of_device(
                SCHEDULE,
                source=PREDICTED if timing is None else MEASURED,
                batch=result.batch,
                scheduler=candidate.scheduler,
                chosen=candidate.scheduler == result.chosen,
                seconds=candidate.step_seconds,
                predicted_seconds=candidate.predicted_seconds,
                spread=None if timing is None else timing.spread,
                rounds=len(candidate.seconds),
                kernels=len(result.kernels),
                launches=launches_of(result, candidate),
                # The paper counts a multiply-add once; ours are two FLOPs.
                multiply_adds=sum(kernel.flops for kernel in result.kernels) / 2,
                moved_bytes=sum(kernel.moved_bytes for kernel in result.kernels),
                states=effort.states,
                timed=effort.timed,
                search_seconds=effort.search_seconds,
                measuring_seconds=effort.measuring_seconds,
            )
    sizes = [result.batch for result in on_device.results]
    for matrix in comparison.specialisations:
        for batch, of_row in zip(sizes, matrix.seconds, strict=True):
            for size, seconds in zip(sizes, of_row, strict=True):
                yield of_device(
                    ELSEWHERE, source=source(row.device), batch=batch, scheduler=DOS,
                    made_for=size, seconds=seconds,
                )  # fmt: skip
    if row.table != TABLE5:
        return
    (result,), (points,) = on_device.results, comparison.sampled
    noise = noise_of(result.candidates)
    for predicted, seconds in points:
        yield of_device(
            SAMPLE, source=MEASURED, batch=result.batch, seconds=seconds,
            predicted_seconds=predicted, spread=noise,
        )  # fmt: skip
    for candidate in (result.candidate(SEQUENTIAL), result.candidate(DOS)):
        for number, predicted in enumerate(candidate.block_seconds, 1):
            yield of_device(
                BLOCK, source=PREDICTED, batch=result.batch, scheduler=candidate.scheduler,
                block=number, predicted_seconds=predicted, kernels=len(result.blocks[number - 1]),
            )  # fmt: skip
