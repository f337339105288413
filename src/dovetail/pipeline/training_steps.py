"""A training step for a loop of the user's own: planned gradients, and torch's own optimizer.

    step(inputs, targets)
      │  a plan: model, loss, gradients, on the module's own parameters and buffers
      ▼
    parameter.grad ─► summed over `accumulate` calls ─► unscaled, clipped ─► optimizer.step() ─► EMA

Only loss and gradients are planned. The update is that of the user's optimizer, which reads its
rates, groups and states at each step. So no number of the optimizer is a constant of the plan.

A plan is of one kind of call: shapes, dtypes, modes of the modules, and which parameters require
gradients. The first kind is planned in the first call. Another, such as that of the last smaller
batch, runs as plain training does, and is planned once it has come often. So does all that has no
plan, for which the log names the reason.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.autograd.function import once_differentiable
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dovetail.errors import RunError, UsageError
from dovetail.executors import LoadedStep
from dovetail.executors.shares import compiled_stages
from dovetail.executors.workers import is_this_process
from dovetail.frontends.capturing import capture_call, unwrap
from dovetail.frontends.fused_updates import is_dense, step_fused
from dovetail.frontends.plain import LossAndGradients
from dovetail.frontends.structures import flatten
from dovetail.machine import Machine
from dovetail.pipeline.optimizing import ModuleState, OpaqueArgumentError, key_of
from dovetail.pipeline.planning import find_plan
from dovetail.pipeline.requests import PlanRequest, is_given, with_fields_of
from dovetail.pipeline.sources import TellProgress, silent
from dovetail.pipeline.using import run
from dovetail.plans import EAGER, PLACED, Plan
from dovetail.runtime.setup import op_threads
from dovetail.runtime.torch_versions import has_parameter_hooks, hook_tables
from dovetail.units import HERE, format_seconds

_log = logging.getLogger(__name__)
OFTEN, MOST_PLANS = 32, 4
"""A kind of call other than the first is planned when it comes for the `OFTEN`th time, since a plan
takes as long as many plain steps. No step has more plans than `MOST_PLANS`."""


@with_fields_of(PlanRequest, skip=("step", "method", "model"))
def training_step(
    model: nn.Module,
    loss: Callable[..., Any] | None,
    optimizer: torch.optim.Optimizer,
    *,
    clip: float | None = None,
    clip_value: float | None = None,
    accumulate: int = 1,
    scaler: GradScaler | None = None,
    autocast: torch.dtype | None = None,
    ema: AveragedModel | float | None = None,
    machine: str | Machine = HERE,
    progress: TellProgress = silent,
    **options: Any,
) -> "TrainingStep":
    """Return a training step that is called in a loop of the user's own.

        step = dt.training_step(model, loss, optimizer, clip=1.0)
        for inputs, targets in batches:
            value = step(inputs, targets)
            scheduler.step()

    A call does what these lines do, and returns the loss, detached:

        optimizer.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()
        torch.nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()

    `step(inputs, *targets, **keywords)` calls `loss(model(inputs, **keywords), *targets)`; a tuple
    or list of inputs is the model's arguments by position. With None for the loss all arguments are
    the model's, and the loss is its output, or its entry or attribute `loss`.

    The first call captures and plans, which takes about the budget. After it `step.plan` is the
    plan and `step.describe()` says what runs. What cannot be planned runs as plain training does.

    The optimizer is the user's own. Groups, rates, schedulers, `load_state_dict` and checkpoints
    work on it, on `model` and on `scaler` as in any loop, at any time between two calls. What the
    optimizer holds is trained and clipped; gradients stay in `parameter.grad` until the next call.
    A loop that does all this by itself takes `step.loss(inputs, targets)` in place of its loss.

    clip, clip_value   limit of the gradients' norm, or of each element
    accumulate         calls whose gradients are summed for one update, each loss divided by it.
                       `step.update()` updates earlier, after a last incomplete sum
    scaler             scales the loss, skips updates whose gradients are not finite, and is updated
    autocast           dtype of `torch.autocast` around model and loss
    ema                averages the weights after each update, in a model of torch's own; a number
                       is a decay, whose model is `step.ema`
    options            fields of `PlanRequest`: `budget`, `compile`, `compile_budget`, `seed`, ...

    Dropout of a plan draws by (seed, number of the step, op) and leaves torch's generator alone, so
    the numbers are others than in plain training. Without compiled code a step computes what plain
    training computes; with it, roundings differ, and updates by SGD, RMSprop, Adam and AdamW on
    CPUs are made by fused kernels.

    Raises `UsageError` for arguments that do not fit.
    """
    return TrainingStep(
        LossAndGradients(model, loss, accumulate, autocast),
        optimizer,
        # Such a step leaves GPUs alone.
        PlanRequest(None, "here/cpu" if machine == HERE else machine, **options),
        progress,
        clip=clip,
        clip_value=clip_value,
        scaler=scaler,
        ema=ema,
    )


@dataclass(eq=False)
class _Planned:
    """A plan at work for one kind of call.

    own       runs it in place; None: the module runs as it is, eager
    threads   of eager
    compiles  it runs compiled code
    state     what the plan holds constant of the model
    aliased   numbers of the gradients that must be copied, as autograd copies them before it hands
              them to a parameter: a clip in place would write elements twice. None: no step ran
    """

    plan: Plan
    own: LoadedStep | None
    threads: int
    compiles: bool
    state: ModuleState
    aliased: tuple[int, ...] | None = None


class _Differentiated(torch.autograd.Function):
    """A loss whose gradients a plan has computed already. Its backward pass hands them over."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: Any, *trained: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> Any:
        # Autograd takes a gradient that nobody else holds as it is, and copies any other one.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the gradients of this loss were taken already; compute it again")
        if scale != 1:
            gradients = [None if each is None else each * scale for each in gradients]
        return None, None, *gradients


class TrainingStep:
    """A training step for a loop of the user's own. `training_step` makes it.

    plan   of the first kind of call; None before it, and where there is none
    ema    the averaged model, or None
    """

    def __init__(
        self,
        module: LossAndGradients,
        optimizer: torch.optim.Optimizer,
        request: PlanRequest,
        progress: TellProgress,
        *,
        clip: float | None,
        clip_value: float | None,
        scaler: GradScaler | None,
        ema: AveragedModel | float | None,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                "optimizer", f"is a {type(optimizer).__name__}, not one of torch.optim"
            )
        closure = signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is Parameter.empty:
            says = f"is {type(optimizer).__name__}, whose step calls the loss several times"
            raise UsageError("optimizer", says)
        for name in ("objective", "micro_batches", "replicas", "place", "stages"):
            if is_given(name, getattr(request, name)):
                raise UsageError(name, "is not for a step in a loop of your own; leave it out")
        if not is_this_process(here := request.asked_machine):
            says = f"is {here.name}; a step in a loop of your own runs on all cores as one device"
            raise UsageError("machine", f"{says}: here/cpu")
        own = set(map(id, module.parameters()))
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise UsageError("model", "has no parameter that requires gradients")
        if others := sum(id(parameter) not in own for parameter in held):
            says = f"holds {others} of {len(held)} parameters that are not the model's"
            raise UsageError("optimizer", f"{says}; make it of model.parameters()")
        if not any(parameter.requires_grad for parameter in held):
            raise UsageError("optimizer", "holds no parameter that requires gradients")
        for option, value in (("clip", clip), ("clip_value", clip_value)):
            if value is not None and not (isinstance(value, (int, float)) and value > 0):
                raise UsageError(option, f"is {value!r}; give a number above 0")
        if clip is not None and clip_value is not None:
            raise UsageError("clip_value", "does not go with clip; leave one of the two out")
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise UsageError("scaler", f"is a {type(scaler).__name__}, not a torch.amp.GradScaler")
        if isinstance(ema, (int, float)):
            if not 0 < ema < 1:
                raise UsageError("ema", f"is {ema}; a decay is a number between 0 and 1: .999")
            average = get_ema_multi_avg_fn(ema)  # type: ignore[no-untyped-call]
            ema = AveragedModel(module.model, multi_avg_fn=average)
        elif ema is not None and not isinstance(ema, AveragedModel):
            raise UsageError("ema", f"is a {type(ema).__name__}; give an AveragedModel or a decay")
        self.plan: Plan | None = None
        self.ema = ema
        self._module, self._optimizer, self._scaler = module, optimizer, scaler
        self._clip, self._clip_value = clip, clip_value
        self._request, self._progress = request, progress
        self._modules = list(module.modules())
        # Kind of call -> its plan, or how often it has come.
        self._of_kinds: dict[Any, _Planned | int] = {}
        self._settings: dict[Any, int] = {}  # modes and trained parameters -> their number
        self._plans = 0  # that were made
        self._has_changed = False  # a call changed the model before its plan ran once
        self._summed = 0  # calls whose gradients are in `parameter.grad` and not yet applied
        self._compiles = False  # one of these ran compiled code
        self._why_plain = ""
        self._failure = ""  # of a plan, in the call that runs
        self._closed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Train on one batch; return the loss. See `training_step`."""
        args, targets = self._split(args)
        trained = self._trained()
        if not self._summed:
            self._optimizer.zero_grad()
        scale = None
        if self._scaler is not None:
            # The scaler keeps its state on the device of what it scales first.
            device = self._optimizer.param_groups[0]["params"][0].device
            scale = self._scaler.scale(torch.ones((), device=device))
        planned = None
        if not self._why_plain:
            planned = self._planned(args, kwargs, targets, scale, trained)
        computed = self._by_plan(planned, args, kwargs, targets, scale)
        with torch.enable_grad(), torch.inference_mode(False):
            if computed is None:
                threads = planned.threads if planned is not None else 0
                with op_threads(threads or torch.get_num_threads()):
                    loss, scaled = self._module.losses(args, kwargs, targets, scale)
                    scaled.backward()  # type: ignore[no-untyped-call]
                self._give_up_what_failed()
            else:
                loss, gradients = computed
                with torch.no_grad():
                    for parameter, gradient in zip(trained, gradients, strict=True):
                        if parameter.grad is None:
                            parameter.grad = gradient
                        elif gradient is not None:
                            parameter.grad.add_(gradient)
            compiles = computed is not None and planned is not None and planned.compiles
            self._compiles = self._compiles or compiles
            self._summed += 1
            if self._summed >= self._module.accumulate:
                self.update()
        return loss

    def loss(self, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of one batch, for a loop that differentiates, clips and updates by itself. Its
        backward pass, of which there is one, adds the gradients, which the plan has computed
        already, to `parameter.grad`. Nothing else of this step is used."""
        if self._module.accumulate > 1:
            says = (
                "is of a step that updates; a loop that differentiates by itself divides its sums"
            )
            raise UsageError("accumulate", says)
        args, targets = self._split(args)
        trained = self._trained()
        planned = None
        if not self._why_plain:
            planned = self._planned(args, kwargs, targets, None, trained)
        computed = self._by_plan(planned, args, kwargs, targets, None)
        if computed is not None:
            loss: Tensor = _Differentiated.apply(*computed, *trained)  # type: ignore[no-untyped-call]
            return loss
        loss = self._module.losses(args, kwargs, targets, None)[1]
        self._give_up_what_failed()
        return loss

    def _split(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The model's arguments by position, and the loss's after the output."""
        if self._closed:
            raise RunError("this training step is closed; make another with training_step(...)")
        if torch.is_autocast_enabled("cpu"):
            raise UsageError("autocast", "is on around the step; give training_step its dtype")
        if self._module.loss is None:
            return args, ()
        inputs, targets = args[:1], args[1:]
        return tuple(inputs[0]) if inputs and type(inputs[0]) in (tuple, list) else inputs, targets

    def _trained(self) -> list[Tensor]:
        """The parameters that are trained, in the optimizer's order."""
        held = [p for group in self._optimizer.param_groups for p in group["params"]]
        # A parameter may stand twice in a group.
        return [parameter for parameter in dict.fromkeys(held) if parameter.requires_grad]

    def _parameters(self) -> dict[Tensor, None]:
        """The parameters in the model's order. `module.parameters()` takes as long as some
        steps."""
        places = chain.from_iterable([part._parameters.values() for part in self._modules])
        return dict.fromkeys(place for place in places if place is not None)

    def _by_plan(
        self, planned: _Planned | None, args: Any, kwargs: Any, targets: Any, scale: Tensor | None
    ) -> tuple[Tensor, list[Tensor | None]] | None:
        """The loss, and the gradient of each trained parameter, by a plan. None if none does it: it
        runs as plain training does."""
        self._failure = ""
        if planned is None or planned.own is None:
            return None
        try:
            loss, computed = planned.own.step(
                args, kwargs, targets, *(() if scale is None else (scale,))
            )
        except Exception as error:
            self._failure = f"a planned step failed: {error}"
            # That closed its run. Another stands ready, and draws on from where this one was.
            failed, seed = planned.own, self._request.seed
            failed.close()
            with suppress(Exception):
                planned.own = run(planned.plan, failed.captured, seed=seed, in_place=True)
                planned.own.steps = failed.steps
            return None
        gradients = list(computed)
        if planned.aliased is None:
            given = flatten((args, kwargs, targets))[0]
            lasting = (*self._module.parameters(), *self._module.buffers(), *given)
            planned.aliased = _aliased(gradients, lasting)
        for number in planned.aliased:
            gradients[number] = gradients[number].clone(memory_format=torch.contiguous_format)
        return loss, gradients

    def _give_up_what_failed(self) -> None:
        """End a plan that failed at what plain training has done since. What is wrong with a batch
        plain training raises in the words of torch, and the next one may be right."""
        failure, self._failure = self._failure, ""
        if failure:
            self._run_plainly(failure)

    def update(self) -> None:
        """Apply the gradients that were summed so far, if there are any."""
        if not self._summed:
            return
        # Whatever of the update raises, the next call begins a new sum.
        compiles, self._compiles, self._summed = self._compiles, False, 0
        optimizer, scaler = self._optimizer, self._scaler
        if scaler is not None:
            scaler.unscale_(optimizer)
        # A norm is summed in the model's order, as in loops that clip `model.parameters()`.
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        parameters = [p for p in self._parameters() if id(p) in held]
        if len(parameters) < len(held):  # the model has other parts since
            self._modules = list(self._module.modules())
            parameters = [p for p in self._parameters() if id(p) in held]
        if self._clip is not None:
            nn.utils.clip_grad_norm_(parameters, self._clip)
        if self._clip_value is not None:
            nn.utils.clip_grad_value_(parameters, self._clip_value)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        elif compiles:
            step_fused(optimizer)
        else:
            optimizer.step()
        if self.ema is not None:
            self.ema.update_parameters(self._module.model)

    def describe(self) -> str:
        """One sentence: what computes loss and gradients, and how fast that was measured to be."""
        if self._closed:
            return "this training step is closed"
        if self._why_plain:
            return f"plain training runs: {self._why_plain}"
        if self.plan is None:
            return "nothing has run yet; the first step is planned when it is called"
        plan, measured = self.plan, self.plan.measured
        whats = {PLACED: f"a plan on {plan.machine.name}", EAGER: "the module as it is, eager,"}
        what = whats.get(plan.way, f"the module by {plan.way}")
        others = {way: value for way, value in measured.items() if way != plan.way}
        if not others:
            return f"{what} computes loss and gradients; it was not compared with other ways"
        rival = min(others, key=lambda way: others[way])
        own = measured[plan.way]
        return (
            f"{what} computes loss and gradients in {format_seconds(own)}, "
            f"{others[rival] / own:.2f} times as fast as {rival} ({format_seconds(others[rival])})"
        )

    def close(self) -> None:
        """Release the plans. Model and optimizer stay as they are."""
        self._forget()
        self._closed = True

    def _planned(
        self,
        args: Any,
        kwargs: Any,
        targets: Any,
        scale: Tensor | None,
        trained: list[Tensor],
    ) -> _Planned | None:
        """The plan for calls of this kind, or None: it runs as plain training does. So does the
        call that is planned: what it changes of the model's Python values a plan would not."""
        requiring: list[Tensor] = []
        try:
            given_key = key_of((args, kwargs, targets), requiring)
        except OpaqueArgumentError:
            return None
        # A graph has no place for the gradients of inputs.
        if requiring:
            return None
        kind = self._kind(given_key, scale, trained)
        known = self._of_kinds.get(kind, 0)
        has_hooks = any(map(has_parameter_hooks, trained))
        hooked = "the model has hooks, which a plan does not call"
        if isinstance(known, _Planned):
            if known.own is None or (not has_hooks and known.state.holds()):
                return known
            never_ran = known.aliased is None
            if has_hooks or (never_ran and self._has_changed):
                changes = "each call changes values that the model holds in Python"
                self._run_plainly(hooked if has_hooks else changes)
                return None
            if never_ran:
                # Models of transformers set a value in their first call, and never again. The plan
                # that knows it takes the place of this one.
                self._has_changed, self._plans = True, self._plans - 1
                self.plan = None if self.plan is known.plan else self.plan
            else:
                _log.warning("values that the model holds in Python have changed; they end a plan")
            known.own.close()
            self._modules = list(self._module.modules())
            kind = self._kind(given_key, scale, trained)
            known = OFTEN - 1 if never_ran else 0
        self._of_kinds[kind] = known + 1
        if self._plans and (known + 1 != OFTEN or self._plans >= MOST_PLANS):
            return None
        module, why = self._module, ""
        tensors = (*trained, *flatten((args, kwargs, targets))[0])
        if unwrap(module.model) is not module.model:
            why = f"the model is in {type(module.model).__name__}, which works in backward passes"
        elif has_hooks or any(hook_tables(module)):
            why = hooked
        elif any(tensor.device.type != "cpu" for tensor in tensors):
            why = "its tensors are not all on the CPU"
        elif ModuleState(module).is_opaque:
            why = "what the model's parts hold in Python cannot be compared from call to call"
        if why:
            self._run_plainly(why)
            return None
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        given = (args, kwargs, targets, *(() if scale is None else (scale,)))
        try:
            if not names.keys() >= set(map(id, trained)):
                raise UsageError("optimizer", "holds parameters that are not the model's")
            # A plan to run the module as it is keeps the module, so each has one of its own.
            module = LossAndGradients(
                module.model,
                module.loss,
                module.accumulate,
                module.dtype,
                tuple(names[id(parameter)] for parameter in trained),
            )
            captured = capture_call(module, given, {})
            if captured.plain is None:
                self._run_plainly("the model writes over its inputs")
                return None
            plan = find_plan(replace(self._request, step=captured), self._progress)
            if plan.interrupted:
                raise KeyboardInterrupt
            seed = self._request.seed
            own = None if plan.way == EAGER else run(plan, captured, seed=seed, in_place=True)
        except Exception as error:
            why = str(error).strip().partition("\n")[0] or type(error).__name__
            if self._plans:
                _log.warning("a further kind of call of the training step has no plan: %s", why)
            else:
                self._run_plainly(why)
            return None
        compiles = plan.way not in (PLACED, EAGER) or bool(compiled_stages(plan))
        threads = plan.machine.devices[0].op_threads if plan.way == EAGER else 0
        planned = _Planned(plan, own, threads, compiles, ModuleState(module))
        self._plans += 1
        self._of_kinds[kind] = planned
        self.plan = self.plan or plan
        _log.info("%s", self.describe())
        return None

    def _kind(self, given_key: Any, scale: Tensor | None, trained: list[Tensor]) -> Any:
        """What a plan holds constant of a call: its arguments' key, and the model's settings."""
        settings = (
            scale is None,
            tuple([module.training for module in self._modules]),
            tuple(map(id, trained)),
            # A plan names parameters, which another tensor may have replaced or tied.
            tuple(map(id, self._parameters())),
        )
        return given_key, self._settings.setdefault(settings, len(self._settings))

    def _run_plainly(self, why: str) -> None:
        """Run plain training from now on, and tell why, in one line."""
        why = why.strip().partition("\n")[0]
        _log.warning("the training step runs as plain training does: %s", why)
        self._why_plain = why
        self._forget()

    def _forget(self) -> None:
        for planned in self._of_kinds.values():
            if isinstance(planned, _Planned) and planned.own is not None:
                planned.own.close()
        self._of_kinds.clear()
        self.plan = None


def _aliased(gradients: Sequence[Tensor | None], lasting: Iterable[Tensor]) -> tuple[int, ...]:
    """Numbers of the gradients that share memory with each other or with what lasts, or whose
    elements do not each have a place of their own."""
    counts = Counter(g.untyped_storage().data_ptr() for g in gradients if g is not None)
    counts.update(tensor.untyped_storage().data_ptr() for tensor in lasting)
    return tuple(
        number
        for number, gradient in enumerate(gradients)
        if gradient is not None
        and (
            counts[gradient.untyped_storage().data_ptr()] > 1
            or not is_dense(gradient.shape, gradient.stride())
        )
    )
