"""Every exception this package raises.

DovetailError
├── InvalidError            bad input; the command line exits with 2
│   ├── FileFormatError       .path .detail
│   │   ├── JournalError        a journal or snapshot that cannot be trusted
│   │   ├── PolicyFileError     a policy that cannot be read
│   │   └── ExternalDataError   .tensor .location  a weight whose bytes are not where it says
│   │       └── EscapingDataError  a location outside the model's folder
│   ├── UnwritableError       .path
│   ├── UsageError            .option
│   ├── GraphError            a graph that is not a usable DAG
│   │   ├── CycleError          .cycle   names as data flows, first == last
│   │   ├── DuplicateOpError    .op
│   │   ├── UnknownProducerError .op .tensor
│   │   ├── InvalidSizeError    .op .field .value
│   │   └── ReplicationError    .op  it has no data-parallel towers; "" where no op forbids them
│   ├── MachineError          a machine that cannot be
│   │   ├── UnknownPresetError  .preset .known .near
│   │   ├── UnknownDeviceError  .device .known
│   │   └── NoRouteError        .source .destination
│   ├── ModelError            a MODEL text or module that cannot be used   .model
│   │   ├── UnknownNetworkError .network .known
│   │   ├── CaptureError        .location  "file.py:12: the line", where it is known
│   │   │   └── ModelRaisedError  the model's own code raised; the command line exits with 1
│   │   ├── OpenAxisError       .input .axes  sizes, and names of the open ones; None: any number
│   │   └── UnsupportedOpError  .op
│   │       ├── UnknownOpError    .domain .kind
│   │       └── UnknownShapeError .output
│   ├── CostError             an op without a cost   .op
│   ├── PinError              a pin that matches no op   .pattern
│   ├── MissingLibraryError   a library that is not installed   .library
│   ├── ExportError           a format that cannot say what a plan does   .format .where
│   ├── TooManyIdealsError    a graph too wide for a programme over ideals   .count .limit
│   ├── RaceError             streams and buffers whose ops can collide   .rule .first .second
│   ├── TooManyStatesError    a block too wide for a programme over its states   .ops .states .limit
│   ├── TooManyIntervalsError a graph too large for the model of `exact`   .count .limit
│   ├── PlanError             a plan that breaks a rule   .rule
│   │   ├── UnplacedOpError     .op .device
│   │   ├── OrderError          .device
│   │   ├── PromiseError        .promise .promised .found
│   │   ├── NotContiguousError  .device .path
│   │   ├── SplitModuleError    .module .devices
│   │   ├── GraphMismatchError  .expected .found
│   │   └── MachineMismatchError .expected .found
│   ├── UnknownRuleError      .rule .known
│   ├── RunMismatchError      .folder .field .expected .found
│   └── PolicyMismatchError   .policy .reason
├── InfeasibleError         no plan fits; the command line exits with 3
│   ├── OutOfMemoryError      .device .needed_bytes .available_bytes
│   ├── NoPlanFitsError       proven: there is none   .proof
│   └── NoDeviceError         .op
└── RunError                a plan or a training run that failed while it ran; exit status 1
    ├── UserCodeError         the user's code raised or ended the program   .doing .said .location
    │   └── CallbackError       a callback of a training run; the model has what was trained so far
    ├── TrainingError         training that cannot go on
    │   ├── DivergedError       .rule .detail .advice
    │   ├── ServerLostError     .restarts .status
    │   └── NoWorkersError      .lost .status
    ├── UnequalError          a schedule whose outputs are others   .scheduler .error
    ├── ProcessError          .process .traceback .said
    ├── ProcessDiedError      .process .status
    ├── WorkerError           .device .op .traceback .said
    ├── WorkerDiedError       .device .op .status
    ├── PeerLostError         .rank .said
    └── RankLostError         .host .rank .op .said
"""

from typing import Any, Self

from dovetail.units import format_bytes


class DovetailError(Exception):
    """Base class: `except DovetailError` catches everything we raise on purpose.

    Errors can be pickled, so that they cross from one process to another.
    """

    exit_status = 1

    @property
    def line(self) -> str:
        """The message in one line."""
        return " ".join(str(self).splitlines())

    def __reduce__(self) -> tuple[Any, ...]:
        # Most classes build their message from other arguments than `args`, so pickle must not
        # call them with `args`, as it would by default.
        return self._rebuilt, (self.args, vars(self))

    @classmethod
    def _rebuilt(cls, arguments: tuple[Any, ...], attributes: dict[str, Any]) -> Self:
        error = cls.__new__(cls, *arguments)
        vars(error).update(attributes)
        return error


class InvalidError(DovetailError):
    """Input that cannot be used; the message names it and says what to do."""

    exit_status = 2


class FileFormatError(InvalidError):
    def __init__(self, path: str, detail: str) -> None:
        super().__init__(f"cannot read {path}: {detail}")
        self.path = path
        self.detail = detail


class ExternalDataError(FileFormatError):
    def __init__(self, path: str, tensor: str, location: str, detail: str) -> None:
        super().__init__(path, f"it keeps tensor {tensor!r} in {location!r}, {detail}")
        self.tensor = tensor
        self.location = location


class EscapingDataError(ExternalDataError):
    """A location that is not a file in the model's own folder; it is not opened."""


class UnwritableError(InvalidError):
    def __init__(self, path: str, detail: str) -> None:
        super().__init__(f"cannot write {path}: {detail}")
        self.path = path


class UsageError(InvalidError):
    def __init__(self, option: str, detail: str) -> None:
        super().__init__(f"{option}: {detail}")
        self.option = option


class GraphError(InvalidError):
    """A graph that is not a usable DAG."""


class CycleError(GraphError):
    def __init__(self, cycle: tuple[str, ...]) -> None:
        super().__init__("graph has a cycle: " + " -> ".join(cycle))
        self.cycle = cycle


class DuplicateOpError(GraphError):
    def __init__(self, op: str) -> None:
        super().__init__(f"two ops are named {op!r}; names must be unique")
        self.op = op


class UnknownProducerError(GraphError):
    def __init__(self, op: str, tensor: int) -> None:
        super().__init__(f"op {op!r} reads tensor {tensor}, which no op produces")
        self.op = op
        self.tensor = tensor


class InvalidSizeError(GraphError):
    def __init__(self, op: str, field: str, value: object) -> None:
        super().__init__(f"op {op!r}: {field} is {value}, but must be finite and not negative")
        self.op = op
        self.field = field
        self.value = value


class ReplicationError(GraphError):
    def __init__(self, detail: str, op: str = "") -> None:
        super().__init__(f"this graph cannot be replicated: {detail}")
        self.op = op


class MachineError(InvalidError):
    """A machine that cannot be."""


class UnknownPresetError(MachineError):
    def __init__(self, preset: str, known: tuple[str, ...], near: tuple[str, ...] = ()) -> None:
        meant = f"did you mean {' or '.join(near)}? Use" if near else "use"
        super().__init__(
            f"no machine named {preset!r}; {meant} here, here/2, a .toml file, a paper's rl17/2, "
            "rl17/4 or gdp/2 to gdp/8, or presets joined as "
            '"2 x rtx3090 + ryzen9"; `dovetail machine --presets` lists them'
        )
        self.preset = preset
        self.known = known
        self.near = near


class UnknownDeviceError(MachineError):
    def __init__(self, device: str, known: tuple[str, ...]) -> None:
        super().__init__(f"no device named {device!r}; the machine has {', '.join(known)}")
        self.device = device
        self.known = known


class NoRouteError(MachineError):
    def __init__(self, source: str, destination: str) -> None:
        super().__init__(
            f"no link from {source} to {destination}, and none through the host; add a link"
        )
        self.source = source
        self.destination = destination


class ModelError(InvalidError):
    def __init__(self, model: str, detail: str) -> None:
        super().__init__(f"{model}: {detail}")
        self.model = model


class UnknownNetworkError(ModelError):
    def __init__(self, network: str, known: tuple[str, ...]) -> None:
        super().__init__(f"zoo:{network}", f"no such network; the zoo has {', '.join(known)}")
        self.network = network
        self.known = known


class CaptureError(ModelError):
    """A module that cannot become a graph.

    `location` is "file.py:12: the line" of the model where the trouble began, or "" if unknown.
    """

    def __init__(self, model: str, detail: str, location: str = "") -> None:
        super().__init__(model, f"{detail} (at {location})" if location else detail)
        self.location = location


class ModelRaisedError(CaptureError):
    """A module or loss whose own code raised while it was captured. The exit status is 1, as for
    all that a user's code raises."""

    exit_status = 1


class OpenAxisError(ModelError):
    def __init__(self, model: str, input: str, axes: tuple[int | str, ...] | None) -> None:
        shape = "x".join(str(axis or "?") for axis in axes or ("any shape",))
        sizes = [str(axis) if isinstance(axis, int) else "1" for axis in axes or (1, 3, 224, 224)]
        example = f"say its sizes, as --shape {input}={'x'.join(sizes)}"
        super().__init__(model, f"input {input!r} is {shape}: {example}")
        self.input = input
        self.axes = axes


class UnsupportedOpError(ModelError):
    def __init__(self, model: str, op: str, detail: str) -> None:
        super().__init__(model, f"op {op!r} {detail}")
        self.op = op


class UnknownOpError(UnsupportedOpError):
    def __init__(self, model: str, op: str, domain: str, kind: str) -> None:
        where = f" of the domain {domain!r}" if domain else ""
        super().__init__(model, op, f"is an unknown {kind}{where}; export with standard ops")
        self.domain = domain
        self.kind = kind


class UnknownShapeError(UnsupportedOpError):
    def __init__(self, model: str, op: str, output: str, detail: str) -> None:
        super().__init__(model, op, f"makes {output!r}, whose shape is not known: {detail}")
        self.output = output


class CostError(InvalidError):
    def __init__(self, op: str, detail: str) -> None:
        super().__init__(f"no cost for op {op!r}: {detail}")
        self.op = op


class PinError(InvalidError):
    def __init__(self, pattern: str, detail: str = "matches no op or module") -> None:
        super().__init__(f"pin {pattern!r} {detail}")
        self.pattern = pattern


class TooManyIdealsError(InvalidError):
    def __init__(self, count: int, limit: int) -> None:
        super().__init__(
            f"ideal_dp: the graph has {count} ideals or more, and {limit} are the limit; use "
            "linear_dp or local_search, or coarser groups"
        )
        self.count = count
        self.limit = limit


class TooManyIntervalsError(InvalidError):
    def __init__(self, count: int, limit: int) -> None:
        super().__init__(
            f"exact: its model has up to {count} intervals or hops, and {limit} are the limit; "
            "use local_search or auto, or coarser groups"
        )
        self.count = count
        self.limit = limit


class ExportError(InvalidError):
    """What `format` cannot express; `where` names the module, op or device that it fails at."""

    def __init__(self, format: str, where: str, detail: str) -> None:
        super().__init__(f"cannot write this as {format}: {where} {detail}")
        self.format = format
        self.where = where


class MissingLibraryError(InvalidError):
    def __init__(self, library: str, install: str) -> None:
        super().__init__(f"the library {library} is not installed; install it with {install}")
        self.library = library


class PlanError(InvalidError):
    """A plan that breaks rule number `rule` of `plans.check`."""

    rule = 0

    def __init__(self, message: str) -> None:
        super().__init__(f"plan rule {self.rule}: {message}" if self.rule else message)


class GraphMismatchError(PlanError):
    rule = 1

    def __init__(self, expected: str, found: str) -> None:
        super().__init__(f"the plan was made for graph {expected}, but this graph is {found}")
        self.expected = expected
        self.found = found


class MachineMismatchError(PlanError):
    rule = 2

    def __init__(self, expected: str, found: str) -> None:
        super().__init__(f"the plan was made for machine {expected}, but this machine is {found}")
        self.expected = expected
        self.found = found


class UnplacedOpError(PlanError):
    rule = 3

    def __init__(self, op: str, device: int | str, detail: str = "is not a device") -> None:
        super().__init__(f"op {op!r} is placed on {device}, which {detail}")
        self.op = op
        self.device = device


class OrderError(PlanError):
    rule = 4

    def __init__(self, device: str, detail: str) -> None:
        super().__init__(f"the order of device {device} {detail}")
        self.device = device


class PromiseError(PlanError):
    rule = 5

    def __init__(self, promise: str, promised: float | str, found: float | str) -> None:
        super().__init__(f"the plan promises {promise} {promised!r}, but it is {found!r}")
        self.promise = promise
        self.promised = promised
        self.found = found


class NotContiguousError(PlanError):
    """`path` names an op on the device, one elsewhere that depends on it, and one that is back."""

    rule = 6

    def __init__(self, device: str, path: tuple[str, str, str]) -> None:
        super().__init__(
            f"device {device} is not contiguous: a path leaves it from {path[0]!r} to {path[1]!r} "
            f"and is back at {path[2]!r}"
        )
        self.device = device
        self.path = path


class SplitModuleError(PlanError):
    rule = 7

    def __init__(self, module: str, devices: tuple[str, str]) -> None:
        super().__init__(
            f"module {module!r} is kept whole, but runs on {devices[0]} and on {devices[1]}"
        )
        self.module = module
        self.devices = devices


class InfeasibleError(DovetailError):
    """No plan fits.

    interrupted   True: Ctrl-C ended the search that found none
    """

    exit_status = 3
    interrupted = False


class OutOfMemoryError(InfeasibleError):
    def __init__(self, device: str, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(
            f"device {device} needs {format_bytes(needed_bytes)} ({needed_bytes} bytes) but has "
            f"{format_bytes(available_bytes)}; {needed_bytes - available_bytes} bytes are lacking"
        )
        self.device = device
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class NoPlanFitsError(InfeasibleError):
    """Not just that none was found; `proof` says why there is none."""

    def __init__(self, proof: str) -> None:
        super().__init__(
            f"no placement fits into memory, proven by {proof}; add a device, raise its memory or "
            "its cap, or lower the batch"
        )
        self.proof = proof


class NoDeviceError(InfeasibleError):
    def __init__(self, op: str) -> None:
        super().__init__(
            f"no device may run op {op!r}: its device kinds, pins and costs forbid all"
        )
        self.op = op


class RunError(DovetailError):
    """A plan that failed while it ran."""


def _raised_in(traceback: str) -> str:
    """What a traceback says was raised, in one line: the line below the frames of its last part.
    What a library adds further down is advice."""
    lines = traceback.strip().splitlines() or [""]
    begins = [number for number, line in enumerate(lines) if line.startswith("Traceback")]
    if not begins:
        return lines[-1]
    below = [line for line in lines[begins[-1] + 1 :] if not line.startswith(" ")]
    return below[0] if below else lines[-1]


class UserCodeError(RunError):
    """The user's code raised an exception or ended the program.

    doing      what was being done, such as "importing mymodels" or "item 3 of the data set"
    said       the exception in one line, such as "ValueError: its text"
    location   "file.py:12: the line", the innermost of the user's own code; "" if there is none
    """

    def __init__(self, doing: str, said: str, location: str = "") -> None:
        super().__init__(f"{doing} failed: {said}" + (f" (at {location})" if location else ""))
        self.doing = doing
        self.said = said
        self.location = location


class CallbackError(UserCodeError):
    """A callback of a training run raised. The run ended in order, so the model has its result."""


class ProcessError(RunError):
    """A worker process raised; `traceback` is the one it wrote, and `said` the exception in one
    line."""

    def __init__(self, process: str, traceback: str, said: str = "") -> None:
        self.said = said or _raised_in(traceback)
        super().__init__(f"process {process} failed: {self.said}")
        # Python prints it below its own traceback.
        self.add_note(traceback)
        self.process = process
        self.traceback = traceback


class ProcessDiedError(RunError):
    """A worker process is gone; `status` is "exit status 1" or "killed by SIGKILL"."""

    def __init__(self, process: str, status: str) -> None:
        super().__init__(f"process {process} died ({status})")
        self.process = process
        self.status = status


class WorkerError(RunError):
    def __init__(self, device: str, op: str, traceback: str, said: str = "") -> None:
        self.said = said or _raised_in(traceback)
        where = f" in op {op!r}" if op else ""
        super().__init__(f"device {device} failed{where}: {self.said}")
        # Python prints it below its own traceback.
        self.add_note(traceback)
        self.device = device
        self.op = op
        self.traceback = traceback


class WorkerDiedError(RunError):
    def __init__(self, device: str, op: str, status: str) -> None:
        where = f"in op {op!r}" if op else "between steps"
        super().__init__(f"the process of device {device} died ({status}) {where}")
        self.device = device
        self.op = op
        self.status = status


class PeerLostError(RunError):
    """The connection of a GPU with one of another rank has failed.

    rank   the other rank
    """

    def __init__(self, rank: int, said: str) -> None:
        super().__init__(f"the connection with rank {rank} failed: {said}")
        self.rank = rank
        self.said = said


class RankLostError(RunError):
    """A rank of a run on several hosts has ended, failed or gone silent, and so the run ends on
    all.

    op   the op that the rank was last seen at; "" between steps
    """

    def __init__(self, host: str, rank: int, op: str, said: str) -> None:
        where = f"in op {op!r}" if op else "between steps"
        super().__init__(f"rank {rank} on host {host} was lost {where}: {said}")
        self.host = host
        self.rank = rank
        self.op = op
        self.said = said


# Learned placers.


class PolicyFileError(FileFormatError):
    """A policy file that is broken, foreign, or of another version."""


class PolicyMismatchError(InvalidError):
    """A policy that cannot serve this problem: made for another graph, or of another method."""

    def __init__(self, policy: str, reason: str) -> None:
        super().__init__(f"policy {policy} cannot be used here: {reason}")
        self.policy = policy
        self.reason = reason


# Stage schedules.


class TooManyStatesError(InvalidError):
    """A block is too wide for a programme over its sets of ops."""

    def __init__(self, ops: int, states: float, limit: int) -> None:
        super().__init__(
            f"a block of {ops:,} ops has more than {limit:,} states, about {states:.1g}: use a "
            "window, which leaves out stages that run far ahead"
        )
        self.ops = ops
        self.states = states
        self.limit = limit


class UnequalError(RunError):
    """A schedule at work whose outputs are not those of its kernels one by one."""

    def __init__(self, scheduler: str, error: float) -> None:
        super().__init__(
            f"the outputs of {scheduler!r} are off by {error:.1e} of their largest value"
        )
        self.scheduler = scheduler
        self.error = error


class RaceError(InvalidError):
    """Streams, events or buffers by which two ops can collide; `rule` as in `schedulers.races`."""

    def __init__(self, rule: int, first: int, second: int, detail: str) -> None:
        ops = f"op {first}" if first == second else f"ops {first} and {second}"
        super().__init__(f"rule {rule}: {ops}: {detail}")
        self.rule = rule
        self.first = first
        self.second = second


# Training by a parameter server.


class UnknownRuleError(InvalidError):
    def __init__(self, rule: str, known: tuple[str, ...]) -> None:
        super().__init__(f"there is no update rule {rule!r}; there are {', '.join(known)}")
        self.rule = rule
        self.known = known


class JournalError(FileFormatError):
    """A journal or snapshot that was changed since it was written, or is another program's."""


class RunMismatchError(InvalidError):
    """A run folder that belongs to another run."""

    def __init__(self, folder: str, field: str, expected: object, found: object) -> None:
        super().__init__(
            f"{folder} holds a run whose {field} is {found}, but here it is {expected}; resume it "
            "with what it was started with, or give another folder"
        )
        self.folder = folder
        self.field = field
        self.expected = expected
        self.found = found


class TrainingError(RunError):
    """A training run that cannot go on; its last state is kept where it has a folder."""


class DivergedError(TrainingError):
    """The center left all bounds: commits were refused, or the loss grew without end."""

    def __init__(self, rule: str, detail: str, advice: str = "") -> None:
        super().__init__(
            f"training by {rule} diverged: {detail}" + (f"; {advice}" if advice else "")
        )
        self.rule = rule
        self.detail = detail
        self.advice = advice


class ServerLostError(TrainingError):
    """The parameter server died more often than the policy allows."""

    def __init__(self, restarts: int, status: str) -> None:
        super().__init__(f"the parameter server died, {status}, after {restarts} restarts")
        self.restarts = restarts
        self.status = status


class NoWorkersError(TrainingError):
    """Too few workers: all are gone or hung, or more were lost than the policy replaces."""

    def __init__(self, lost: int, status: str) -> None:
        super().__init__(
            f"{lost} workers were lost, more than the policy allows; the last of them: {status}"
        )
        self.lost = lost
        self.status = status
