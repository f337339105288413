"""The request for a training: the one record that the command line and `Trainer` build.

The defaults and the meaning of each option of training stand here and nowhere else. The record
checks what can be checked without the data; `preparing` checks the rest. This module imports
neither torch nor numpy, so that the command line can show its help at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.errors import UsageError
from dovetail.request_fields import documented, option, option_made, read_values
from dovetail.training import options
from dovetail.training.backends import BACKENDS
from dovetail.training.options import FailurePolicy, Guard, Storage

if TYPE_CHECKING:
    from torch import nn

    from dovetail.training.backends.contract import Backend
    from dovetail.training.callbacks import Callback
    from dovetail.training.datasets import Collate
    from dovetail.training.modules import Loss
    from dovetail.training.rules.contract import Rule
    from dovetail.training.torch_optimizers import MakeOptimizer, Schedule
    from dovetail.training.validation import Metrics

STORAGE_OPTIONS = tuple(
    each.name for each in fields(Storage) if each.name not in ("folder", "resume")
)
"""`storage` may set these fields of `Storage`. The others follow from `folder` and `resume`."""

PARTITIONS = {
    "leased": "one shuffled pool, from which all workers lease; a slow worker trains fewer samples",
    "fixed": "a share for each worker, drawn once",
    "by-label": "the samples sorted by label, then cut into a share for each worker",
}
"""Partition -> what is whose, for the help; see `positions`."""


def named_backend(backend: str) -> str:
    """The backend of that name, or the one that "auto" stands for. Raises `UsageError` for one that
    does not go with how this process was started."""
    ranks = launched_ranks()
    if backend == "auto":
        return "ranks" if ranks > 1 else "processes"
    if backend == "ranks" and ranks == 1:
        says = "ranks needs several ranks, which torchrun or another launcher starts"
        raise UsageError("backend", says)
    if backend != "ranks" and ranks > 1:
        says = f"{backend} does not join the {ranks} ranks that were started; leave it out"
        raise UsageError("backend", f"{says}, or give ranks")
    return backend


def launched_ranks() -> int:
    """How many ranks a launcher has started, of which this process is one; 1 if none has. Raises
    `UsageError`."""
    return _launched_place()[1]


def launched_rank() -> int:
    """The number of this process among the ranks that a launcher has started; 0 if none has."""
    return _launched_place()[0]


def _launched_place() -> tuple[int, int]:
    if os.environ.get("WORLD_SIZE", "1") in ("", "1"):
        return 0, 1
    # Imported here, because few runs need it.
    from dovetail.runtime.ranks import place_of_ranks

    place = place_of_ranks("")
    return (0, 1) if place is None else (place.rank, place.ranks)


def prints() -> bool:
    """True if this process prints: rank 0 does, and one that no launcher started. Variables that
    make no sense are looked at where ranks are used."""
    return os.environ.get("RANK", "0") in ("", "0")


# --- How texts of options are read ---


def _read_window(flag: str, text: str) -> int | str | None:
    """The window that "10" or "auto" names; None for "all", one commit at the end. Raises
    `UsageError`."""
    if text in ("auto", "all"):
        return text if text == "auto" else None
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(flag, f"is a number of steps, auto or all, not {text!r}")
    return int(text)


def _read_metrics(_flag: str, texts: Sequence[str]) -> Metrics:
    """The metrics of these names, of which package.module:function is a function of the user's
    own. Raises `ModelError` for one that cannot be imported."""
    from dovetail.runtime.functions import find_function, names_function

    return tuple(find_function(text) if names_function(text) else text for text in texts)


@documented
@dataclass(frozen=True)
class TrainRequest:
    """How a module is trained. Raises `UsageError` for a setting that no run can have.

    model           any `nn.Module` on the CPU, or a Keras 3 model on torch. It is trained in place
    loss            a function (output, *targets) -> the mean over the batch's samples
    optimizer       a name ("adam"; SGD needs `lr`), a function of parameters, a record, or an
                    optimizer of torch or Keras (see `torch_optimizers`). Each worker has an
                    optimizer of its own; for the rule `sync` the server has it
    schedule        a factor of the learning rate by epoch, or a torch scheduler
                    (`torch_optimizers`)
    callbacks       told of epochs and commits in the caller's process; they may end the run
    collate         a function items -> batch, for data sets that are not arrays
    storage         further settings of `Storage`, beside `folder` and `resume`
    group           processes of each worker, which average their gradients (see `group`)
    name            the label of the run's history. "": the rule's name
    shards, order   see `backends.contract`
    guard, policy   see `options`
    """

    model: nn.Module
    loss: Loss
    optimizer: MakeOptimizer | str | Any
    rule: Rule | str = option(
        "adag-agn",
        "Update rule of workers and server; --rules lists all of them",
        more="A name in `RULES`, or `make_rule(name, **options)`",
    )
    workers: int = option(
        2,
        "Workers that train side by side; under torchrun by default at least one a rank",
        least=1,
        more="A worker is a process, or a group of processes, that computes gradients",
    )
    backend: Backend | str = option(
        "auto",
        "; ".join(f"{entry.name}: {entry.help}" for entry in BACKENDS.values())
        + "; auto: ranks under torchrun, else processes",
        more="Or a function. Several ranks take no other backend than ranks",
    )
    _: KW_ONLY
    window: int | str | None = option(
        "auto",
        "Local steps between two commits to the server. all: one commit, at the end",
        read=_read_window,
        shown="auto: the rule's own, mostly 1",
        more='None stands for all, and "auto" for the rule\'s own',
    )
    batch: int = option(32, "Samples in a local step", least=1)
    epochs: int = option(1, "Passes over all samples", least=1)
    partition: str = option(
        "leased",
        "; ".join(f"{name}: {help}" for name, help in PARTITIONS.items()),
        more="`fixed` and `by-label` need a data set of known length, and `by-label` a label a "
        "sample. Workers train a lost one's share once they have finished their own (`ledger`)",
    )
    device: str = option(
        "cpu",
        "Where workers and evaluations compute: cpu, cuda (the GPUs in turn; with ray, those that "
        "Ray assigns) or cuda:NUMBER",
        more="Several workers share a GPU. The caller's process computes the run's evaluations on "
        "the named GPU, for cuda on its first one; if Ray's caller has no GPU, on the CPU. The "
        "center is on the CPU",
    )
    autocast: str = option(
        "",
        "bfloat16: workers compute in it by torch.autocast, on a GPU evaluations too",
        more="Evaluations on the CPU use the model's own dtype",
    )
    lr: float | None = option(None, "Learning rate, in place of the optimizer's own", kind=float)
    schedule: Schedule | None = None
    backend_options: Mapping[str, Any] = option_made(
        dict,
        "KEY=VALUE, a setting of the backend, e.g. latency_seconds=0.01 of simulated",
        "--backend-option",
        kind=list[str],
        read=read_values,
    )
    seed: int = option(0, "Seed of the run", least=0)
    metrics: Metrics = option(
        (),
        "Figure of the validation set to report beside the loss: accuracy, or "
        "package.module:function, (output, target) -> its mean over a batch",
        "--metric",
        kind=list[str],
        read=_read_metrics,
    )
    validate: int | str = option(
        "epoch",
        "When to validate: epoch (after each), a number of samples, or seconds (30s)",
        read=lambda _flag, text: int(text) if text.isdecimal() else text,
        more="The end of the run is validated in any case",
    )
    monitor: str = option(
        "loss",
        "Figure that decides which validation is the best",
        more="A loss, an error or a perplexity is better when it is lower, any other figure when "
        "it is higher",
    )
    patience: int | None = option(
        None,
        "Stop after this many validations without a better one",
        kind=int,
        least=1,
        more="The best center is kept",
    )
    wire: str = option(
        "none", "How commits are compressed: none, float16, bfloat16 or topk:FRACTION"
    )
    callbacks: Sequence[Callback] = ()
    collate: Collate | None = None
    folder: str | os.PathLike[str] | None = option(
        None, "Keep the run's state in this folder, so that the run can be resumed", kind=Path
    )
    resume: bool = option(
        False,
        "Continue the run in --folder",
        more="Workers' optimizers start anew, as after any restart. There may be more epochs now, "
        "or unless workers have shares (`partition`) another number of workers",
    )
    storage: Mapping[str, Any] = field(default_factory=dict)
    group: int = 1
    guard: Guard = field(default_factory=Guard)
    policy: FailurePolicy = field(default_factory=FailurePolicy)
    shards: int | None = None
    order: tuple[int, ...] | None = None
    name: str = ""

    def __post_init__(self) -> None:
        for name in ("workers", "epochs", "batch", "group"):
            options.count(name, getattr(self, name))
        for name in ("patience", "shards"):
            if getattr(self, name) is not None:
                options.count(name, getattr(self, name))
        options.count("seed", self.seed, least=0)
        if not callable(self.loss):
            raise UsageError("loss", f"{self.loss!r} is not callable")
        if self.partition not in PARTITIONS:
            says = f"must be one of {', '.join(PARTITIONS)}, not {self.partition!r}"
            raise UsageError("partition", says)
        if not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", str(self.device)):
            raise UsageError("device", f"must be cpu, cuda or cuda:NUMBER, not {self.device!r}")
        if self.autocast not in ("", "bfloat16"):
            raise UsageError("autocast", f"must be bfloat16 or left out, not {self.autocast!r}")
        options.window(self.window)
        if isinstance(self.backend, str):
            object.__setattr__(self, "backend", named_backend(self.backend))
        elif not callable(self.backend):
            raise UsageError("backend", f"{self.backend!r} is no name, and not callable")
        elif self.backend_options:
            raise UsageError("backend_options", "go with a backend's name")
        if self.folder is None:
            if self.resume:
                raise UsageError("resume", "needs the folder of the run")
            if self.storage:
                raise UsageError("storage", "needs a folder")
        for name in self.storage:
            if name not in STORAGE_OPTIONS:
                offered = ", ".join(STORAGE_OPTIONS)
                raise UsageError("storage", f"has no {name!r}; it has {offered}")
        self.evaluation_times(None)

    @property
    def rule_name(self) -> str:
        """The rule's name, whether it is given by name or bound."""
        return self.rule if isinstance(self.rule, str) else self.rule.name

    def evaluation_times(self, epoch_samples: int | None) -> tuple[int | None, float | None]:
        """`validate` as (samples, seconds) between evaluations, of which at least one is None.

        epoch_samples   samples of an epoch, or None if the number is not known
        """
        if self.validate == "epoch":
            return epoch_samples, None
        if isinstance(self.validate, str):
            match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*s\s*", self.validate)
            if match is None or float(match[1]) <= 0:
                says = f'must be "epoch", samples, or "30s", not {self.validate!r}'
                raise UsageError("validate", says)
            return None, float(match[1])
        options.count("validate", self.validate)
        return self.validate, None
