"""Trains by an update rule in a loop of the caller's: `Optimizer` wraps the caller's own optimizer.

    caller   forward, backward ─► step ─┐          each of torchrun's ranks is a worker
    step     gradient ─► the worker's loop (`worker.loop`) ─► commit, pull ─► parameters

The rules, the worker's loop and the server are those of `Trainer`; only the gradient comes from
elsewhere. Every local step copies the gradient and the parameters to vectors on the CPU. A commit
is made in the step that ends a window.

The rule `sync` differs in one thing: the server returns the mean gradient, and each rank's own
optimizer steps by it, as with DDP. So any optimizer with any groups may be wrapped, and its state
is where the caller saves it. Each rank counts the same, as with DDP, whatever its batches are.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dovetail.errors import DivergedError, ModelError, TrainingError, UsageError
from dovetail.training import options
from dovetail.training.backends.contract import FailurePolicy
from dovetail.training.backends.ranks.meeting import check_listen
from dovetail.training.divergence import remedy
from dovetail.training.learner import Gradient
from dovetail.training.modules import DTYPES, store_gradient, views_of
from dovetail.training.ranks import CenterFacts, open_center
from dovetail.training.records import Refusal, Vector, Verdict
from dovetail.training.rules import RULES, entry_of, make_rule
from dovetail.training.rules.contract import Local, Rule
from dovetail.training.rules.pushing import TOTAL, add_gradient, mean
from dovetail.training.torch_optimizers import check_server_steps, check_steps
from dovetail.training.validation import compute_statistics
from dovetail.training.worker import Ask, Look, Loop, Stepped, Told, loop

ENDLESS = 2**40
"""The window of a run that commits once, at its end: more local steps than any run has."""
_RATE_OF_COMMITS = ("dc-asgd", "dc-asgd-adaptive", "downpour-adagrad")
"""Rules whose server steps by the one learning rate that a commit carries."""


class Optimizer(torch.optim.Optimizer):
    """An optimizer whose steps train by a rule, together with those of torchrun's other ranks.

    optimizer         of `torch.optim` or with its interface. It makes the local steps, and its
                      groups and its state are those of this object
    rule              a name in `RULES`, or `make_rule(name, **options)`
    window            local steps between commits. None: one commit, at the end; "auto": the rule's
                      own
    timeout_seconds   how long rank 0 waits until each rank has made its optimizer. A rank that
                      neither steps nor calls `liveness.alive` for so long counts as hung, and
                      others go on
    listen            the address of rank 0's machine at which it listens for ranks on others; "":
                      that of the interface which leads to MASTER_ADDR

    All ranks make it, with equal settings and parameters of equal shapes; rank 0's values are
    copied to all. Without torchrun it is one worker around a server in this process. Weights may
    be loaded until the first step, the same ones on every rank. From then on the parameters are
    this object's: each step overwrites them. `finish` ends the training on all ranks; a program
    that ends without it leaves nothing behind, but if it is rank 0's, the others fail.

    Parameters that need no gradient when this is made are left out. Buffers belong to the rank.
    A parameter whose `grad` is None is left alone by the local step; with `sync` its gradient
    counts as 0. `state_dict` is the wrapped optimizer's: a new run begins a new window at its
    parameters. Do not wrap the model in `DistributedDataParallel`.

    Raises `UsageError`, `UnknownRuleError` and `ModelError` for what cannot be trained; `step` and
    `finish` raise `TrainingError` if rank 0 or the server has died, and `DivergedError` if too many
    commits were refused.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rule: Rule | str = "adag-agn",
        window: int | str | None = "auto",
        *,
        timeout_seconds: float = 1800.0,
        listen: str = "",
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            says = f"give a torch.optim.Optimizer, not {type(optimizer).__name__}"
            raise UsageError("optimizer", says)
        if isinstance(optimizer, Optimizer):
            raise UsageError("optimizer", "is wrapped already")
        check_steps(optimizer)
        options.positive("timeout_seconds", timeout_seconds)
        check_listen(listen)
        self._inner = optimizer
        # The groups are the same dictionaries, so schedulers of this object act on both.
        self._is_made = False
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._is_made = True
        self._follow()
        self._parameters, self._frozen = _parameters_of(optimizer)
        self._rule = _bind(rule, optimizer)
        self._is_sync = self._rule.name == "sync"
        dtype = np.dtype(DTYPES[self._parameters[0].dtype])
        size = sum(parameter.numel() for parameter in self._parameters)
        self._gradient = np.zeros(size, dtype)
        self._gradients = views_of(torch.from_numpy(self._gradient), self._parameters)
        self._home = np.zeros(size, dtype)
        self._homes = views_of(torch.from_numpy(self._home), self._parameters)
        self._shown: Vector | None = None  # the vector whose values the parameters have
        self._loop: Loop | None = None
        self._is_over = False
        self._clock = self._refusals = 0
        server_rule = make_rule("averaging") if self._is_sync else self._rule
        shapes = tuple(tuple(parameter.shape) for parameter in self._parameters)
        options.window(window)
        steps = RULES[self._rule.name].window if isinstance(window, str) else window
        facts = CenterFacts(
            self._rule.name, dict(self._rule.options), ENDLESS if steps is None else steps,
            dtype.name, shapes,
        )  # fmt: skip
        self._center = open_center(server_rule, facts, timeout_seconds, listen)
        with self._closing_on_errors():
            self._show(self._center.share(self._gather()))

    @property
    def rank(self) -> int:
        """This rank's number; rank 0 has the server."""
        return self._center.rank

    @property
    def ranks(self) -> int:
        """How many ranks there were at the beginning."""
        return self._center.ranks

    # What every optimizer has

    def step(self, closure: Any = None) -> Any:
        """Makes a local step by the parameters' gradients, commits at the end of a window, and
        returns what `closure` returned, if one is given."""
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        if self._is_over:
            raise UsageError("step", "the training has ended; make another optimizer")
        if any(parameter.requires_grad for parameter in self._frozen):
            raise UsageError(
                "step",
                "a parameter needs a gradient that needed none when the optimizer was made; make "
                "it afterwards",
            )
        with self._closing_on_errors():
            if self._loop is None:
                self._begin()
            for piece, parameter in zip(self._gradients, self._parameters, strict=True):
                store_gradient(piece, parameter.grad)
            # The loss is the caller's and is not asked for: reading it would make a GPU wait.
            if self._advance(Gradient(self._gradient, float("nan"), 1)):
                raise TrainingError("the parameter server has ended the run")
        return value

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, which fits the wrapped optimizer by itself, too."""
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._inner.load_state_dict(state_dict)
        self._follow()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._is_made:
            says = "all ranks have agreed on the parameters; give all groups to the wrapped one"
            raise UsageError("add_param_group", says)
        super().add_param_group(param_group)

    def _follow(self) -> None:
        """Takes the groups and the state over that the wrapped optimizer has now."""
        self.param_groups, self.state = self._inner.param_groups, self._inner.state

    # The center

    @contextmanager
    def at_center(self, *, together: bool = False) -> Iterator[None]:
        """The parameters are the center's within, to evaluate or to save it. Then they are this
        rank's again. Other ranks go on meanwhile.

        together   all ranks call this after as many steps, wait for each other, and get the same
                   center; a rank that has died is then an error
        """
        # By `sync` all ranks have the center's parameters.
        if self._loop is None or self._is_sync:
            yield
            return
        kept = self._gather().copy()
        with self._closing_on_errors():
            if together:
                self._center.meet()
            self._show(self._center.copy())
            if together:
                self._center.meet()
        try:
            yield
        finally:
            self._show(kept)

    def center_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """A copy of the model's `state_dict` with the center's parameters. Buffers are this
        rank's."""
        with self.at_center():
            state = model.state_dict()
            return {
                name: value.detach().clone() if isinstance(value, Tensor) else value
                for name, value in state.items()
            }

    def finish(self, model: nn.Module | None = None, batches: Iterable[Any] = ()) -> None:
        """Commits the window as far as it has come, waits until all ranks have finished or died,
        and gives every rank the last center.

        model     its batch norms' running statistics are computed anew over `batches` (inputs, or
                  pairs of inputs and anything), as `Trainer` does; without them they stay this
                  rank's own
        """
        if not self._is_over:
            with self._closing_on_errors():
                if self._loop is not None:
                    self._advance(None)
                    own = self._gather() if self._is_sync else None
                    self._show(self._center.finish(self._clock, own))
            self.close()
        if model is not None:
            items = list(batches)
            if items:
                compute_statistics(model, items)

    def close(self) -> None:
        """Ends this rank's part at once: what it has not committed is lost, and the parameters stay
        as they are. If it is rank 0, the others fail. May be called twice."""
        self._is_over, self._loop = True, None
        self._center.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.finish()
        else:
            self.close()

    # The worker

    def update(self, theta: Vector, gradient: Vector, epoch: float) -> Vector:
        """Returns U(g) [size]: what the wrapped optimizer changes at `theta` [size], by the
        gradients that the parameters have. See `learner.Stepper`."""
        assert gradient is self._gradient
        # Without locks other ranks write to theta during this step.
        change = theta.copy()
        if theta is not self._shown or self._rule.lock_free:
            self._show(change)
        self._inner.step()
        self._shown = None
        np.subtract(self._gather(), change, out=change)
        return change

    def rate(self, epoch: float) -> float:
        """The learning rate of the first group. See `learner.Stepper`."""
        rates = [float(group.get("lr", 0.0)) for group in self.param_groups]
        if self._rule.name in _RATE_OF_COMMITS and len(set(rates)) > 1:
            says = f"the server of {self._rule.name} steps by one learning rate for all groups"
            raise UsageError("optimizer", says)
        return rates[0]

    def _step_by_mean(self, local: Local) -> None:
        """Begins a window of `sync`: the wrapped optimizer steps by the mean gradient that was
        pulled. The first pull is no gradient."""
        if not self._clock:
            return
        mean_gradient = views_of(torch.from_numpy(local.center), self._parameters)
        for piece, parameter in zip(mean_gradient, self._parameters, strict=True):
            parameter.grad = piece.to(parameter.device, copy=True)
        self._inner.step()
        np.copyto(local.theta, self._gather())

    def _begin(self) -> None:
        rule = self._rule
        if self._is_sync:
            rule = replace(
                make_rule("averaging"), step=add_gradient, message=mean, begin=self._step_by_mean,
                keeps_theta=True, worker_slots=(TOTAL,),
            )  # fmt: skip
        self._center.start(self._gather())
        self._loop = loop(self._center.job, rule, self, self.rank, clock=self._center.seconds)
        self._advance(None)
        # Nobody commits before all have pulled, so the first gradients are those of the center.
        self._center.meet()

    def _advance(self, answer: Told | Gradient | None) -> bool:
        """Lets the worker's loop go on until it wants a gradient. Returns whether it has ended."""
        assert self._loop is not None
        while True:
            try:
                event = self._loop.send(answer)
            except StopIteration:
                return True
            answer = None
            match event:
                case Look(theta):
                    self._show(theta)
                    return False
                case Ask():
                    answer = self._ask(event)
                case Stepped():
                    self._center.show_life()

    def _ask(self, ask: Ask) -> Told:
        told = self._center.ask(ask)
        if told.center is not None:
            self._clock = told.reply.clock
        refusal = told.reply.refusal
        if told.reply.verdict is not Verdict.REFUSED or refusal is None:
            return told
        if self._is_sync:
            says = f"rank {self.rank} can not stay equal to the others: its gradient was refused"
            raise TrainingError(f"{says}, {refusal}")
        self._refusals += refusal is not Refusal.LEASE
        if self._refusals > FailurePolicy().refusals:
            job = self._center.job
            raise DivergedError(
                self._rule.name,
                f"{self._refusals} commits were refused, the last one as {refusal}",
                remedy(self._rule.name, job.window, job.workers),
            )
        return told

    # The parameters

    @torch.no_grad()
    def _gather(self) -> Vector:
        """The parameters' present values [size], until the next call."""
        for home, parameter in zip(self._homes, self._parameters, strict=True):
            home.copy_(parameter)
        return self._home

    @torch.no_grad()
    def _show(self, theta: Vector) -> None:
        """Gives the parameters the values of `theta` [size]."""
        for view, parameter in zip(
            views_of(torch.from_numpy(theta), self._parameters), self._parameters, strict=True
        ):
            parameter.copy_(view)
        self._shown = theta

    @contextmanager
    def _closing_on_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise


def _parameters_of(
    optimizer: torch.optim.Optimizer,
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters that need a gradient, in the groups' order, and the others."""
    parameters, frozen = [], []
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if not parameter.requires_grad:
                frozen.append(parameter)
                continue
            path = f"parameter {place} of group {number}"
            if is_lazy(parameter):
                raise ModelError(path, "has no shape yet; call the model once")
            if parameter.layout != torch.strided:
                raise ModelError(path, "is sparse; only dense parameters train")
            if parameter.dtype not in DTYPES:
                raise ModelError(path, f"is {parameter.dtype}; only float32 and float64 train")
            parameters.append(parameter)
    if not parameters:
        raise ModelError("optimizer", "has no parameter that requires a gradient")
    if len({parameter.dtype for parameter in parameters}) > 1:
        says = "mixes float32 and float64 parameters; convert them to one of them"
        raise ModelError("optimizer", says)
    return parameters, frozen


def _bind(rule: Rule | str, optimizer: torch.optim.Optimizer) -> Rule:
    entry = entry_of(rule)
    bound = make_rule(rule) if isinstance(rule, str) else rule
    if entry.name == "sync" and bound.options != make_rule("sync").options:
        says = "sync takes no options here: each rank's own optimizer steps by the mean gradient"
        raise UsageError("rule", says)
    if entry.server_steps:
        for group in optimizer.param_groups:
            settings = {key: group[key] for key in optimizer.defaults}
            check_server_steps(entry, partial(type(optimizer), **settings))
    return bound
