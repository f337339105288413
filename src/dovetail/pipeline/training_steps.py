"""A training step for a loop of the user's own: planned gradients, and torch's own optimizer.

    step(inputs, targets)
      │  a plan: model, loss, gradients, on the module's own parameters and buffers
      ▼
    parameter.grad ─► summed over `accumulate` calls ─► unscaled, clipped ─► optimizer.step() ─► EMA

Only loss and gradients are planned. The update stays what torch and its user make of it, so that
rates, groups, schedules and loaded states need no word to us: nothing that changes between steps is
a constant of the plan.

A plan is of one form of call: shapes, dtypes, modes of the modules, and which parameters require
gradients. The first form is planned in the first call. Another, such as that of the last smaller
batch, runs as plain training does, and is planned once it has come often. So does all that has no
plan, for which the log names the reason.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dovetail.errors import DovetailError, RunError, UsageError
from dovetail.executors import LoadedStep
from dovetail.executors.shares import compiled_stages
from dovetail.frontends.capturing import capture_call, unwrap
from dovetail.frontends.fused_updates import is_dense, step_fused
from dovetail.frontends.plain import LossAndGradients
from dovetail.frontends.structures import constants, flatten
from dovetail.machine import Machine
from dovetail.pipeline.planning import find_plan
from dovetail.pipeline.requests import PlanRequest, with_fields_of
from dovetail.pipeline.sources import TellProgress, silent
from dovetail.pipeline.using import run
from dovetail.plans import EAGER, PLACED, Plan
from dovetail.runtime.setup import op_threads
from dovetail.runtime.torch_versions import has_parameter_hooks
from dovetail.units import HERE, format_seconds

_log = logging.getLogger(__name__)
OFTEN, MOST_PLANS = 32, 4
"""A form of call other than the first is planned when it comes for the `OFTEN`th time, since a plan
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

    clip, clip_value   limit of the gradients' norm, or of each element
    accumulate         calls whose gradients are summed for one update, each loss divided by it.
                       `step.update()` updates earlier, after a last incomplete sum
    scaler             scales the loss, skips updates whose gradients are not finite, and is updated
    autocast           dtype of `torch.autocast` around model and loss
    ema                averages the weights after each update, in a model of torch's own; a number
                       is a decay, whose model is `step.ema`
    options            fields of `PlanRequest`: `budget`, `compile`, `compile_budget`, `seed`, ...

    Dropout of a plan draws by (seed, number of the step, op) and leaves torch's generator alone, so
    the numbers are others than in plain training. Hooks on modules run once, when a step is
    captured. Without compiled code a step computes what plain training computes; with it, roundings
    differ, and updates by SGD, RMSprop, Adam and AdamW on CPUs are made by fused kernels.

    Raises `UsageError` for arguments that do not fit.
    """
    return TrainingStep(
        LossAndGradients(model, loss, accumulate, autocast),
        optimizer,
        PlanRequest(None, machine, **options),
        progress,
        clip=clip,
        clip_value=clip_value,
        scaler=scaler,
        ema=ema,
    )


@dataclass(eq=False)
class _Planned:
    """A plan at work for one form of call.

    own       runs it in place; None: the module runs as it is, eager
    threads   of eager
    compiles  it runs compiled code
    aliased   numbers of the gradients that must be copied, as autograd copies them before it hands
              them to a parameter: a clip in place would write elements twice. None: no step ran
    """

    plan: Plan
    own: LoadedStep | None
    threads: int
    compiles: bool
    aliased: tuple[int, ...] | None = None


class TrainingStep:
    """A training step for a loop of the user's own. `training_step` makes it.

    plan   of the first form of call; None before it, and where there is none
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
            kind = type(optimizer).__name__
            raise UsageError("optimizer", f"is {kind}, whose step calls the loss several times")
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise UsageError("model", "has no parameter that requires gradients")
        if others := sum(id(parameter) not in names for parameter in held):
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
        self._names, self._modules = names, list(module.modules())
        # Form of call -> its plan, or how often it has come.
        self._of_forms: dict[Any, _Planned | int] = {}
        self._settings: dict[Any, int] = {}  # modes and trained parameters -> their number
        self._summed = 0  # calls whose gradients are in `parameter.grad` and not yet applied
        self._compiles = False  # one of these ran compiled code
        self._why_plain = ""
        self._closed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Train on one batch; return the loss. See `training_step`."""
        if self._closed:
            raise RunError("this training step is closed; make another with training_step(...)")
        targets: tuple[Any, ...] = ()
        if self._module.loss is not None:
            inputs, targets = args[:1], args[1:]
            args = tuple(inputs[0]) if inputs and type(inputs[0]) in (tuple, list) else inputs
        if torch.is_autocast_enabled("cpu"):
            raise UsageError("autocast", "is on around the step; give training_step its dtype")
        held = [p for group in self._optimizer.param_groups for p in group["params"]]
        trained = [parameter for parameter in held if parameter.requires_grad]
        if not self._summed:
            self._optimizer.zero_grad()
        scale = self._scaler.scale(torch.ones(())) if self._scaler is not None else None
        planned = self._planned(args, kwargs, targets, scale, trained)
        loss = None
        if planned is not None and planned.own is not None:
            try:
                loss, gradients = planned.own.step(
                    args, kwargs, targets, *(() if scale is None else (scale,))
                )
            except DovetailError as error:
                # Plain training raises what is wrong in the words of torch. Else it goes on so.
                self._run_plainly(f"a planned step failed: {error}")
        with torch.enable_grad(), torch.inference_mode(False):
            if loss is None:
                threads = planned.threads if planned is not None else 0
                with op_threads(threads or torch.get_num_threads()):
                    loss, scaled = self._module.losses(args, kwargs, targets, scale)
                    scaled.backward()  # type: ignore[no-untyped-call]
            else:
                assert planned is not None, "it has run"
                gradients = list(gradients)
                if planned.aliased is None:
                    given = flatten((args, kwargs, targets))[0]
                    lasting = (*self._module.parameters(), *self._module.buffers(), *given)
                    planned.aliased = _aliased(gradients, lasting)
                for number in planned.aliased:
                    gradients[number] = gradients[number].clone(
                        memory_format=torch.contiguous_format
                    )
                with torch.no_grad():
                    for parameter, gradient in zip(trained, gradients, strict=True):
                        if parameter.grad is None:
                            parameter.grad = gradient
                        elif gradient is not None:
                            parameter.grad.add_(gradient)
            self._compiles = self._compiles or (planned is not None and planned.compiles)
            self._summed += 1
            if self._summed >= self._module.accumulate:
                self.update()
        return loss

    def update(self) -> None:
        """Apply the gradients that were summed so far, if there are any."""
        if not self._summed:
            return
        optimizer, scaler = self._optimizer, self._scaler
        if scaler is not None:
            scaler.unscale_(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self._clip is not None:
            nn.utils.clip_grad_norm_(parameters, self._clip)
        if self._clip_value is not None:
            nn.utils.clip_grad_value_(parameters, self._clip_value)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        elif self._compiles:
            step_fused(optimizer)
        else:
            optimizer.step()
        if self.ema is not None:
            self.ema.update_parameters(self._module.model)
        self._summed = 0

    def describe(self) -> str:
        """One sentence: what computes loss and gradients, and how fast that was measured to be."""
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
        """The plan for calls of this form, or None: it runs as plain training does."""
        if self._why_plain:
            return None
        values = (*args, *kwargs.values(), *targets)
        structure: Any = (len(args), tuple(kwargs))
        if not all(type(value) is Tensor for value in values):
            tensors, names, template = flatten((args, kwargs, targets))
            structure, values = (*names, repr(constants(template))), tuple(tensors)
        # A graph has no place for the gradients of inputs.
        if any(value.requires_grad for value in values):
            return None
        settings = (
            tuple([module.training for module in self._modules]),
            tuple(map(id, trained)),
        )
        form = (
            structure,
            tuple([(value.shape, value.dtype, value.device) for value in values]),
            self._settings.setdefault(settings, len(self._settings)),
        )
        known = self._of_forms.get(form, 0)
        if isinstance(known, _Planned):
            return known
        self._of_forms[form] = known + 1
        plans = sum(isinstance(value, _Planned) for value in self._of_forms.values())
        if plans and (known + 1 != OFTEN or plans >= MOST_PLANS):
            return None
        module, why = self._module, ""
        if unwrap(module.model) is not module.model:
            why = f"the model is in {type(module.model).__name__}, which works in backward passes"
        elif any(map(has_parameter_hooks, trained)):
            why = "a parameter has hooks on its gradient"
        elif any(tensor.device.type != "cpu" for tensor in (*trained, *values)):
            why = "its tensors are not all on the CPU"
        elif not self._names.keys() >= set(map(id, trained)):
            why = "the optimizer was given parameters that are not the model's"
        if why:
            return self._run_plainly(why)
        # A plan to run the module as it is keeps the module, so each has one of its own.
        module = LossAndGradients(
            module.model,
            module.loss,
            module.accumulate,
            module.dtype,
            tuple(self._names[id(parameter)] for parameter in trained),
        )
        given = (args, kwargs, targets, *(() if scale is None else (scale,)))
        try:
            captured = capture_call(module, given, {})
            if captured.plain is None:
                return self._run_plainly("the model writes over its inputs")
            plan = find_plan(replace(self._request, step=captured), self._progress)
            if plan.interrupted:
                raise KeyboardInterrupt
            own = None if plan.way == EAGER else run(plan, captured, seed=plan.seed, in_place=True)
        except DovetailError as error:
            why = str(error).strip().partition("\n")[0]
            if not plans:
                return self._run_plainly(why)
            _log.warning("a further form of the training step has no plan: %s", why)
            return None
        compiles = plan.way not in (PLACED, EAGER) or bool(compiled_stages(plan))
        threads = plan.machine.devices[0].op_threads if plan.way == EAGER else 0
        planned = _Planned(plan, own, threads, compiles)
        self._of_forms[form] = planned
        self.plan = self.plan or plan
        _log.info("%s", self.describe())
        return planned

    def _run_plainly(self, why: str) -> None:
        """Run plain training from now on, and tell why, in one line."""
        why = why.strip().partition("\n")[0]
        _log.warning("the training step runs as plain training does: %s", why)
        self._why_plain = why
        self._forget()

    def _forget(self) -> None:
        for planned in self._of_forms.values():
            if isinstance(planned, _Planned) and planned.own is not None:
                planned.own.close()
        self._of_forms.clear()
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
