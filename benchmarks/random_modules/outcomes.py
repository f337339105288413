"""What became of a case: its captured step beside plain PyTorch, step by step.

    build ──► plain PyTorch, torch.optim        ──► losses, parameters, buffers, state, each step
      │                                             compared with
      └─────► capture ──► run_step in this process ──► the same
                     └──► a random placement, run  ──► the same, and equal to run_step's bits

What random ops drew in the captured step is what they draw in plain PyTorch too (`Replay`), so
that modules with dropout can be compared.
"""

import contextlib
import warnings
from collections import deque
from dataclasses import dataclass

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail.errors import ModelError
from dovetail.executors import run
from dovetail.frontends import capture, initial_values, run_step
from dovetail.graph import Phase

from .cases import DTYPES, OPTIMIZERS, REFUSABLE, REFUSABLE_TOGETHER, smaller

STEPS = 3
# Relative error, and the share of it that counts where the expected value is near 0.
TOLERANCES = {"float64": 1e-9, "float32": 2e-3}
FLOOR = 1e-3
KINDS = ("right", "refused", "wrong", "crashed", "unjustified")
FAULTS = ("wrong", "crashed", "unjustified")
UNEXPLAINED = "failed while it ran on fake tensors"


@dataclass(frozen=True)
class Outcome:
    """What became of a case.

    kind    right        equal to plain PyTorch
            refused      by a typed error that says why, and for a reason (`REFUSABLE`,
                     `REFUSABLE_TOGETHER`)
            unjustified  refused without one
            wrong        other numbers, or capturing changed the module
            crashed      any other error
            impossible   plain PyTorch cannot run it either
    detail  the difference, or the error's text
    """

    kind: str
    detail: str = ""


@dataclass(frozen=True)
class Step:
    """What a step returned (loss or output), and all values after it: parameters and buffers by
    name, optimizer state as "PARAMETER/exp_avg"."""

    result: Tensor
    values: dict[str, Tensor]


class Wrong(Exception):
    """The numbers differ; the message says where."""


def outcome_of(case, place=None):
    """The outcome of a case. `place`: (captured) -> a placed run, where one is to be compared
    too."""
    with _settings(case), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _outcome(case, place)


@contextlib.contextmanager
def _settings(case):
    """One thread and no denormal numbers, as in a device's process; the case's dtype is the
    default, so that what modules make themselves has it."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(DTYPES[case.dtype])
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)


def _outcome(case, place):
    try:
        tried = plain_steps(case, None)
    except Exception as error:
        return Outcome("impossible", _line(error))
    if not all(bool(v.isfinite().all()) for v in (tried[-1].result, *tried[-1].values.values())):
        return Outcome("impossible", "not finite")
    if case.trains and _same_parameters(case, tried[-1]):
        return Outcome("impossible", "nothing is trained")
    try:
        module = case.build()
        try:
            captured = _capture(case, module)
        except ModelError as error:
            return Outcome(_refusal(case, error), str(error))
        _check_module(case, module)
        found, draws = captured_steps(case, captured)
        expected = plain_steps(case, draws) if any(map(any, draws)) else tried
        compare(case, found, expected, "")
        if place is not None:
            placed = placed_steps(case, captured, place)
            compare(case, placed, expected, "placed: ")
            for step, (a, b) in enumerate(zip(placed, found, strict=True)):
                _same_bits(step, a, b)
        if not any(map(any, draws)):  # last, as it trains what a run starts from
            _check_alive(case, module, expected)
    except Wrong as error:
        return Outcome("wrong", str(error))
    except Exception as error:
        return Outcome("crashed", f"{type(error).__name__}: {_line(error)}")
    return Outcome("right")


def _same_parameters(case, step):
    parameters = case.build().named_parameters()
    return all(torch.equal(value, step.values[name]) for name, value in parameters)


def _line(error):
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _refusal(case, error):
    """A refusal says in one line what is the matter and what to do."""
    if UNEXPLAINED in str(error) or "\n" in str(error).strip():
        return "crashed"
    names = set(case.root.names())
    together = any(names.issuperset(pair) for pair in REFUSABLE_TOGETHER)
    return "refused" if together or REFUSABLE.keys() & names else "unjustified"


def _capture(case, module):
    x, target = case.inputs(0)
    if case.trains:
        train = OPTIMIZERS[case.optimizer][0]
        return capture(module, x, targets=target, loss=loss_of, train=train)
    return capture(module, x)


def loss_of(output, target):
    return ((output - target) ** 2).mean()


def _check_module(case, module):
    """Capturing leaves the module as it was."""
    fresh = held(case.build())
    for name, value in held(module).items():
        if isinstance(value, FakeTensor):
            raise Wrong(f"capturing left a fake tensor in the module's {name}")
        if not torch.equal(value, fresh[name]):
            raise Wrong(f"capturing changed the module's {name}")
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(value)):
                raise Wrong(f"capturing left a fake tensor in the attribute {name}.{key}")


def _check_alive(case, module, expected):
    """The captured module still is one that plain PyTorch can train."""
    try:
        steps = plain_steps(case, None, module)
    except Exception as error:
        raise Wrong(f"the module cannot be run once it was captured: {_line(error)}") from error
    compare(case, steps, expected, "the module, run by itself once it was captured: ")


def held(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


# Plain PyTorch -----------------------------------------------------------------------------------


def plain_steps(case, draws, module=None):
    """Steps of plain PyTorch; with `draws`, random ops draw what they drew in `captured_steps`."""
    module = case.build() if module is None else module
    optimizer = OPTIMIZERS[case.optimizer][1](module.parameters()) if case.trains else None
    steps = []
    for step in range(STEPS):
        replay = Replay(*draws[step]) if draws else contextlib.nullcontext()
        x, target = case.inputs(step)
        with replay:
            if optimizer is None:
                with torch.no_grad():
                    result = module(x)
            else:
                optimizer.zero_grad()
                result = loss_of(module(x), target)
                if draws:
                    replay.backward = True
                result.backward()
                optimizer.step()
        steps.append(_noted(result, held(module), _states(module, optimizer)))
    return steps


def _states(module, optimizer):
    if optimizer is None:
        return {}
    return {
        # Counts of steps have torch's default dtype, and are small.
        f"{name}/{state}": value.float() if state == "step" else value
        for name, parameter in module.named_parameters()
        for state, value in optimizer.state[parameter].items()
        if isinstance(value, Tensor)
    }


def _noted(result, *values):
    return Step(
        result.detach().clone(),
        {name: value.detach().clone() for part in values for name, value in part.items()},
    )


class Draws(TorchDispatchMode):
    """Notes what random ops return."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        if _is_random(func) and isinstance(result, Tensor):
            self.found.append((_base(func), result.clone()))
        return result


class Replay(TorchDispatchMode):
    """Lets random ops return what was noted, in order; those of the backward pass apart.

    Where the state of torch's generator is one that was met before, checkpointing has restored it
    to compute something again, and the same is returned again; unless it is drawn by probabilities
    that have changed since, as buffers may that are written each time: then it is what the captured
    step drew anew.
    """

    def __init__(self, forward, backward):
        super().__init__()
        self.queues = deque(forward), deque(backward)
        self.backward = False
        self.of_state = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not _is_random(func):
            return func(*args, **kwargs or {})
        mutable = func._schema.is_mutable
        generator = (kwargs or {}).get("generator")
        state = torch.get_rng_state() if generator is None else generator.get_state()
        state = state.numpy().tobytes()
        probe = func(*args, **kwargs or {})  # also moves the generator on
        if not isinstance(probe, Tensor):
            return probe
        by = args[0].clone() if _base(func) == "aten.bernoulli" and not mutable else None
        value = self._value(state, _base(func), probe, by)
        if value is None:
            return probe
        return args[0].copy_(value) if mutable else value.clone()

    def _value(self, state, base, probe, by):
        """What to return; `by`: the probabilities that it is drawn by, if they are a tensor."""
        queue = self.queues[self.backward]
        head = queue[0] if queue else None
        if state in self.of_state:
            value, before = self.of_state[state]
            if (
                self.backward
                and head is not None
                and by is not None
                and not torch.equal(by, before)
            ):
                return queue.popleft()[1]
            if self.backward and head is not None and torch.equal(head[1], value):
                queue.popleft()  # the captured step computed it again, too
            return value
        if head is None or head[0] != base or head[1].shape != probe.shape:
            return None  # nobody reads it, so that the captured step does not have it
        self.of_state[state] = queue.popleft()[1], by
        return self.of_state[state][0]


def _is_random(func):
    return torch.Tag.nondeterministic_seeded in func.tags and "attention" not in str(func)


def _base(func):
    return str(func.overloadpacket).rstrip("_").removesuffix("_like")


# Captured ----------------------------------------------------------------------------------------


def captured_steps(case, captured):
    """(steps by `run_step`, what random ops drew: per step that of forward and of backward)."""
    values, steps, draws = initial_values(captured), [], []
    for step in range(STEPS):
        x, target = case.inputs(step)
        noted = Draws()
        with noted:
            result = run_step(captured, values, (x,), (target,) * case.trains, step=step)
        steps.append(_noted(result, named_values(captured, values)))
        draws.append(_by_phase(captured, noted.found))
    return steps, draws


def named_values(captured, values):
    """Parameters, buffers and optimizer state by name."""
    return {
        source.name: values[captured.graph.outputs_of(op)[0]]
        for op, source in enumerate(captured.program.sources)
        if source is not None and source.role in ("parameter", "buffer", "state")
    }


def _by_phase(captured, found):
    calls = enumerate(captured.program.calls)
    ops = [op for op, call in calls if call is not None and call.random and _is_random(call.target)]
    split = sum(captured.graph.phases[op] == Phase.FORWARD for op in ops)
    return found[:split], found[split:]


def placed_steps(case, captured, place):
    """Steps of a placed run."""
    steps = []
    with place(captured) as placed:
        for step in range(STEPS):
            x, target = case.inputs(step)
            result = placed.step(x, *(target,) * case.trains)
            values = placed.state_dict(), placed.optimizer_state_dict()
            steps.append(_noted(result, *values))
    return steps


def placing(plan, workers):
    """(captured) -> a run of `plan(captured)` by the workers, for `outcome_of`."""
    return lambda captured: run(plan(captured), captured, workers=workers)


# Comparing ---------------------------------------------------------------------------------------


def compare(case, found, expected, who):
    """Raise `Wrong` where steps differ by more than rounding."""
    tolerance = TOLERANCES[case.dtype]
    for step, (a, b) in enumerate(zip(found, expected, strict=True)):
        what = "loss" if case.trains else "output"
        _close(a.result, b.result, tolerance, f"{who}step {step}: the {what}")
        lacking = b.values.keys() - a.values.keys() if not who.startswith("placed") else ()
        for name in sorted(lacking):
            raise Wrong(f"{who}step {step}: {name} is not there")
        for name in sorted(a.values.keys() & b.values.keys()):
            _close(a.values[name], b.values[name], tolerance, f"{who}step {step}: {name}")
        for name in sorted(a.values.keys() - b.values.keys()):
            if "/" in name:
                raise Wrong(f"{who}step {step}: {name} is kept, but not by plain PyTorch")


def _close(found, expected, tolerance, what):
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise Wrong(
            f"{what} is {found.dtype} {tuple(found.shape)}, not {expected.dtype} "
            f"{tuple(expected.shape)}"
        )
    if not expected.is_floating_point():
        if not torch.equal(found, expected):
            raise Wrong(f"{what} is {found.tolist()}, not {expected.tolist()}")
        return
    error = float(torch.linalg.vector_norm(found.double() - expected.double()))
    size = float(torch.linalg.vector_norm(expected.double()))
    if not error <= tolerance * (size + FLOOR):
        raise Wrong(f"{what} is off by {error:.2g} of {size:.2g}")


def _same_bits(step, placed, found):
    if not torch.equal(placed.result, found.result):
        raise Wrong(f"placed: step {step}: other bits than run_step's")
    for name, value in found.values.items():
        if name in placed.values and not torch.equal(placed.values[name], value):
            raise Wrong(f"placed: step {step}: {name} has other bits than run_step's")


def minimised(case, kind, judge):
    """The case without what it needs not to end as `kind`; `judge(case)` is its outcome."""
    while True:
        for less in smaller(case):
            if judge(less).kind == kind:
                case = less
                break
        else:
            return case
