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
│   │   ├── UnknownPresetError  .preset .known
│   │   ├── UnknownDeviceError  .device .known
│   │   └── NoRouteError        .source .destination
│   ├── ModelError            a MODEL text or module that cannot be used   .model
│   │   ├── UnknownNetworkError .network .known
│   │   ├── CaptureError        .location  "file.py:12: the line", where it is known
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
└── RunError                a plan or a training run that failed while it ran
    ├── TrainingError         training that cannot go on
    │   ├── DivergedError       .rule .detail .advice
    │   ├── ServerLostError     .restarts .status
    │   └── NoWorkersError      .lost .status
    ├── EvaluatorsLostError   .lost .status
    ├── UnequalError          a schedule whose outputs are others   .scheduler .error
    ├── ProcessError          .process .traceback
    ├── ProcessDiedError      .process .status
    ├── WorkerError           .device .op .traceback
    └── WorkerDiedError       .device .op .status
"""

from dovetail.errors.base import (
    CaptureError,
    CostError,
    CycleError,
    DovetailError,
    DuplicateOpError,
    EscapingDataError,
    ExportError,
    ExternalDataError,
    FileFormatError,
    GraphError,
    GraphMismatchError,
    InfeasibleError,
    InvalidError,
    InvalidSizeError,
    MachineError,
    MachineMismatchError,
    MissingLibraryError,
    ModelError,
    NoDeviceError,
    NoPlanFitsError,
    NoRouteError,
    NotContiguousError,
    OpenAxisError,
    OrderError,
    OutOfMemoryError,
    PinError,
    PlanError,
    ProcessDiedError,
    ProcessError,
    PromiseError,
    ReplicationError,
    RunError,
    SplitModuleError,
    TooManyIdealsError,
    TooManyIntervalsError,
    UnknownDeviceError,
    UnknownNetworkError,
    UnknownOpError,
    UnknownPresetError,
    UnknownProducerError,
    UnknownShapeError,
    UnplacedOpError,
    UnsupportedOpError,
    UnwritableError,
    UsageError,
    WorkerDiedError,
    WorkerError,
)
from dovetail.errors.learning import (
    EvaluatorsLostError,
    PolicyFileError,
    PolicyMismatchError,
)
from dovetail.errors.scheduling import RaceError, TooManyStatesError, UnequalError
from dovetail.errors.training import (
    DivergedError,
    JournalError,
    NoWorkersError,
    RunMismatchError,
    ServerLostError,
    TrainingError,
    UnknownRuleError,
)

__all__ = [
    "CaptureError",
    "CostError",
    "CycleError",
    "DivergedError",
    "DovetailError",
    "DuplicateOpError",
    "EscapingDataError",
    "EvaluatorsLostError",
    "ExportError",
    "ExternalDataError",
    "FileFormatError",
    "GraphError",
    "GraphMismatchError",
    "InfeasibleError",
    "InvalidError",
    "InvalidSizeError",
    "JournalError",
    "MachineError",
    "MachineMismatchError",
    "MissingLibraryError",
    "ModelError",
    "NoDeviceError",
    "NoPlanFitsError",
    "NoRouteError",
    "NoWorkersError",
    "NotContiguousError",
    "OpenAxisError",
    "OrderError",
    "OutOfMemoryError",
    "PinError",
    "PlanError",
    "PolicyFileError",
    "PolicyMismatchError",
    "ProcessDiedError",
    "ProcessError",
    "PromiseError",
    "RaceError",
    "ReplicationError",
    "RunError",
    "RunMismatchError",
    "ServerLostError",
    "SplitModuleError",
    "TooManyIdealsError",
    "TooManyIntervalsError",
    "TooManyStatesError",
    "TrainingError",
    "UnequalError",
    "UnknownDeviceError",
    "UnknownNetworkError",
    "UnknownOpError",
    "UnknownPresetError",
    "UnknownProducerError",
    "UnknownRuleError",
    "UnknownShapeError",
    "UnplacedOpError",
    "UnsupportedOpError",
    "UnwritableError",
    "UsageError",
    "WorkerDiedError",
    "WorkerError",
]
