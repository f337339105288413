"""A step at work: what every loaded step does, whoever runs it.

dt.run ──► LoadedStep ┬─ PlacedNetwork   a plan, on processes of this host's CPUs and one of all
                      │                  its GPUs, with a bridge where several ranks run it
                      └─ PlainNetwork    the module as it is, eager or by `torch.compile`
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.errors import RunError, UsageError
from dovetail.frontends.interpret import example_values
from dovetail.frontends.program import Captured
from dovetail.frontends.recording import is_fake
from dovetail.runtime.neighbours import Neighbours
from dovetail.runtime.setup import rest_openmp
from dovetail.runtime.timers import Repeats, clock, summarise, time_steps
from dovetail.timeline import Timeline

Form = tuple[torch.Size, torch.dtype]
StateName = Literal["state_dict", "optimizer_state_dict"]
"""Which part of a step's state is asked for: parameters and buffers, or the optimizer's."""


class LoadedStep(ABC):
    """A step at work; a context manager. `dt.run` makes it.

    A failed step closes it. Later calls raise `RunError` with that reason.

    captured   the step
    fed        inputs and targets that were fed last; None: none were
    steps      number of steps that were run; random ops draw by it
    """

    def __init__(self, captured: Captured, seed: int) -> None:
        self.captured, self._seed = captured, seed
        self.fed: Sequence[Tensor] | None = None
        self.steps = 0
        self._closed = ""
        # Threads of the caller's take turns.
        self._one_step = threading.RLock()
        examples = captured.inputs + (captured.targets if captured.graph.training else ())
        # (shape, dtype) of each tensor that is fed; None: the step does not read it.
        self._forms: list[Form | None] = [(each.shape, each.dtype) for each in examples]

    # ── What a user does ──

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step on the model's own arguments, followed by what its loss takes (positional).

        Returns the loss in training, and otherwise what the model returns, in the model's own
        type. Raises `UsageError` for arguments that do not fit or that were captured as constants
        of another value, and `WorkerError` or `WorkerDiedError` if a device fails.
        """
        tensors = self.captured.signature.tensors(args, kwargs)
        with self._one_step:
            self.feed(tensors)
            return self._run_step()

    def feed(self, tensors: Sequence[Tensor] | None = None) -> None:
        """Set the inputs and targets of the next steps. None stands for the captured examples."""
        self._check_open()
        # Most steps are given dense tensors that fit, and of no class of their own. This quick look
        # spares them the checks that name what is wrong.
        if (
            tensors is None
            or len(tensors) != len(self._forms)
            or not all(
                type(tensor) is Tensor
                and tensor.layout is torch.strided
                and not tensor.is_meta
                and (form is None or (tensor.dtype is form[1] and tensor.shape == form[0]))
                for form, tensor in zip(self._forms, tensors, strict=True)
            )
        ):
            given = labelled(self.captured, tensors, self._seed)
            for form, (_, name, tensor) in zip(self._forms, given, strict=True):
                if form is not None:
                    check_fits(form, tensor, name)
            tensors = [tensor for _, _, tensor in given]
        self._take(tensors)
        self.fed = tuple(tensors)

    def measure(
        self, *, steps: int = 10, warmup: int = 2, inputs: Sequence[Tensor] | None = None
    ) -> "Measurement":
        """Measure by RL17's protocol (see `measure_steps`).

        Steps run on `inputs` (with targets). Without it they run on what was fed last, or on the
        captured examples. They are real steps: in training they change the parameters.
        """
        if inputs is not None:
            self.feed(inputs)
        return measure_steps(
            partial(seconds_of_call, self._step_on_fed),
            self.timeline,
            steps=steps,
            warmup=warmup,
            others_cores=self._neighbours().settled,
        )

    def step_seconds(self, steps: int = 10) -> NDArray[np.float64]:
        """[steps - 1] seconds of each of `steps` steps, without the first.

        These are the seconds that `measure` counts. No timeline is made, so this is cheaper: it
        serves as the reward of a search.
        """
        check_steps(steps)
        one_step = partial(seconds_of_call, self._step_on_fed)
        return np.array(time_steps(one_step, Repeats(steps - 1)))

    @abstractmethod
    def timeline(self) -> Timeline:
        """The timeline of one more step, on what was fed last or on the captured examples."""

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of parameters and buffers, by their names in the plain module's state_dict."""
        self._check_open()
        return self._copies("state_dict")

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Set parameters and buffers.

        Raises `UsageError` for missing or unknown names and for tensors that do not fit. In that
        case nothing has changed.
        """
        self._replace("state_dict", state)

    def optimizer_state_dict(self) -> dict[str, Tensor]:
        """Copies of the optimizer's state, under names such as "PARAMETER/exp_avg"."""
        self._check_open()
        return self._copies("optimizer_state_dict")

    def load_optimizer_state_dict(self, state: dict[str, Tensor]) -> None:
        """Set the optimizer's state. Raises as `load_state_dict` does.

        Training then goes on as if it had not stopped, except that random ops draw by the number
        of the step in this run.
        """
        self._replace("optimizer_state_dict", state)

    def keep_checkpoints(self, folder: str | Path, every: int) -> None:
        """Save the state in this folder after each `every` steps from now on. Raises `UsageError`
        if the folder holds another run's checkpoints or files that are no checkpoints, and if there
        is only one rank."""
        raise UsageError("folder", NEEDS_RANKS)

    def save(self, folder: str | Path) -> None:
        """Write parameters, buffers and the optimizer's state; see `executors.rank_checkpoints`.
        Raises `UnwritableError` on all ranks if one could not write, and otherwise what
        `keep_checkpoints` raises."""
        raise UsageError("folder", NEEDS_RANKS)

    def resume(self, folder: str | Path) -> int:
        """Go on from the last checkpoint in this folder, which may be of a plan with other devices;
        return its step. Raises `FileFormatError`, and `UsageError` where not several ranks run."""
        raise UsageError("folder", NEEDS_RANKS)

    def close(self) -> None:
        """End the step: its memory is released, and its processes end unless they were borrowed. A
        closed step cannot be opened again."""
        self._end(kill=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end(kill=error is not None)

    # ── What differs ──

    @abstractmethod
    def _take(self, tensors: Sequence[Tensor]) -> None:
        """Bring the inputs and targets of the next steps, which fit, to where the step runs."""

    @abstractmethod
    def _run_step(self) -> Any:
        """Run one step on what was fed last or on the captured examples; return its results."""

    @abstractmethod
    def _neighbours(self) -> Neighbours:
        """A watch for other programs on the cores that the step runs on."""

    @abstractmethod
    def _copies(self, what: StateName) -> dict[str, Tensor]:
        """Copies of this part of the state, by name."""

    @abstractmethod
    def _values(self, what: StateName) -> dict[str, Tensor]:
        """Name -> the tensor of this part of the state, or one of its shape and dtype."""

    @abstractmethod
    def _put(self, what: StateName, state: dict[str, Tensor]) -> None:
        """Set this part of the state to tensors that fit."""

    @abstractmethod
    def _end(self, *, kill: bool) -> None:
        """Close. With `kill`, processes get no time to end by themselves."""

    # ── What they share ──

    def _step_on_fed(self) -> Any:
        self.feed(self.fed)
        return self._run_step()

    def _replace(self, what: StateName, state: dict[str, Tensor]) -> None:
        self._check_open()
        # All are checked before the first is copied, so that an error leaves everything as it was.
        check_values(what, self._values(what), state)
        self._put(what, state)

    def _check_open(self) -> None:
        """Raise `RunError` if this was closed."""
        if self._closed:
            raise RunError(f"this run is closed: {self._closed}; start another with run(plan, ...)")


NEEDS_RANKS = "is of a run on several ranks; start them by torchrun"
"""The error's text for a checkpoint folder that is given to a run on one rank."""


TIMED_STEPS = 3
"""A measurement runs this many stamped steps for the timeline, after the steps that count."""


@dataclass(frozen=True, eq=False)
class Measurement:
    """Result of measuring a loaded plan.

    step_seconds   [steps] seconds of each step that counts
    timeline       the stamped step of median length
    others_cores   how many of the plan's cores other programs used meanwhile; 0 where that is not
                   known
    """

    step_seconds: NDArray[np.float64]
    timeline: Timeline
    others_cores: float = 0.0

    @property
    def median_seconds(self) -> float:
        return float(np.median(self.step_seconds))

    @property
    def mean_seconds(self) -> float:
        return float(np.mean(self.step_seconds))

    @property
    def minimum_seconds(self) -> float:
        return float(np.min(self.step_seconds))

    @property
    def spread(self) -> float:
        """Interquartile range, divided by the median."""
        return summarise(self.step_seconds.tolist()).spread


def measure_steps(
    step_seconds: Callable[[], float],
    timeline: Callable[[], Timeline],
    *,
    steps: int,
    warmup: int,
    others_cores: Callable[[], float | None] = lambda: None,
) -> Measurement:
    """Warm up, time `steps` (at least 2) steps and drop the first, then run the stamped steps.

    Paper: the protocol of RL17 (Mirhoseini et al., "Device Placement Optimization with
    Reinforcement Learning", ICML 2017, https://arxiv.org/abs/1706.04972, section 4). Differences:
    the median is reported, because identical runs differ on a shared machine. The steps that count
    are calls as a user makes them (`seconds_of_call`), and not stamped, because stamping takes
    time.

    `step_seconds()` runs a step and returns its seconds, and `timeline()` returns the timeline of
    one more step. `others_cores()` returns how many cores other programs used meanwhile.
    """
    check_steps(steps)
    # The first of the `steps` warms up as well.
    seconds = np.array(time_steps(step_seconds, Repeats(steps - 1), warm_ups=warmup + 1))
    others = others_cores() or 0.0
    timelines = sorted(
        (timeline() for _ in range(TIMED_STEPS)), key=lambda timeline: timeline.step_seconds
    )
    return Measurement(seconds, timelines[TIMED_STEPS // 2], others)


def seconds_of_call(step: Callable[[], object]) -> float:
    """Seconds of one call of `step` as its user has them, who works between steps on torch's own
    threads. Such work leaves threads behind that spin, and a step pays for them."""
    torch.ones(USERS_WORK).add_(1.0)
    began = clock()
    step()
    seconds = clock() - began
    # The next call that is measured must not pay for this step's threads.
    rest_openmp()
    return seconds


USERS_WORK = 1 << 18
"""A user's own work between two steps, as numbers that are added up: enough for eight threads."""


def check_steps(steps: int) -> None:
    """Raise `UsageError` for so few steps that none would count."""
    if steps < 2:
        raise UsageError("steps", f"is {steps}, but must be at least 2: the first is dropped")


def labelled(
    captured: Captured, tensors: Sequence[Tensor] | None, seed: int
) -> list[tuple[str, str, Tensor]]:
    """(name of the source, name for the user, tensor) of each input of a step, and in training of
    each target. Raises `UsageError` if there are too many or too few tensors.

    tensors   None stands for the captured examples, drawn with `seed` if they are fake
    """
    if tensors is None:
        inputs, targets = example_values(captured, seed)
        tensors = (*inputs, *targets)
    sources = captured.signature.sources
    if not captured.graph.training:
        count = len(captured.signature.names)
        if len(tensors) == count + len(captured.targets):
            # Inference has no use for targets.
            tensors = tensors[:count]
        sources = sources[:count]
    if len(tensors) != len(sources):
        needed = ", ".join(name for _, name in sources)
        raise UsageError("step", f"takes {needed}, but got {len(tensors)} tensors")
    return [(*names, tensor) for names, tensor in zip(sources, tensors, strict=True)]


def check_values(what: str, values: dict[str, Tensor], given: dict[str, Tensor]) -> None:
    """Raise `UsageError` unless `given` has a tensor that fits for each value, and no other."""
    missing, unknown = set(values) - set(given), set(given) - set(values)
    if missing or unknown:
        raise UsageError(what, f"lacks {sorted(missing)}, has unknown {sorted(unknown)}")
    for name, value in values.items():
        check_fits((value.shape, value.dtype), given[name], name)


def check_fits(form: Form, tensor: Tensor, name: str) -> None:
    """Raise `UsageError` unless the tensor is dense, real, and of this shape and dtype."""
    shape, dtype = form
    if tensor.layout != torch.strided or is_fake(tensor):
        kind = "sparse" if tensor.layout != torch.strided else "without numbers (meta or fake)"
        raise UsageError(name, f"is {kind}; give a dense tensor")
    if shape != tensor.shape or dtype != tensor.dtype:
        raise UsageError(
            name,
            f"is {tensor.dtype} of shape {tuple(tensor.shape)}, but the plan was made for "
            f"{dtype} of shape {tuple(shape)}",
        )
