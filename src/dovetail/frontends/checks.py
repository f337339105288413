"""Checks that a model makes of data: assertions, `if not valid: raise`, validation of arguments.

The model asks for the truth of a traced tensor, which has none while a step is captured. If one of
the two answers makes the model raise, the captured step goes on with the other one. An operator,
`dovetail::check`, stays in the graph; it raises the model's error at a step whose tensor says
otherwise.

    run 1   guess each answer ──► the model raises: the last answer was wrong, run again
    run 2   ──► the step is recorded
    run 3.. one for each line that asked, with its other answer ──► the model must raise

Where both answers let the model go on, its values may depend on the branch. One kind of branch
becomes part of the graph: `if not ok: h = clamp(h)`, with any function of `_LIMITS`. Let P be the
rest of the step as a function of what clamp returns. The step must compute the same by P(h) as
without the branch; then it is P(where(ok, h, clamp(h))) in both cases. Other branches are refused.
"""

import builtins
import dis
import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from dovetail.runtime.torch_versions import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from dovetail.runtime.user_code import location_of, text_of

_LIBRARY: Any = torch.library.Library("dovetail", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("check(Tensor value, bool expected, str kind, str text) -> Tensor")


def _check(value: Tensor, expected: bool, kind: str, text: str) -> Tensor:
    """Return a copy of the value, or raise the exception of this builtin kind and text if the value
    is not the expected one."""
    if bool(value) is not expected:
        raise getattr(builtins, kind)(text)
    return value.clone()


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("check", _check, _device)
_LIBRARY.impl("check", lambda value, *_: torch.empty_like(value), "Meta")
CHECK = torch.ops.dovetail.check.default

Site = tuple[Any, ...]
"""A place in the code that asks: where each function on the stack is, and the texts among the local
variables of the innermost one, which go into its message."""
_MOST_CALLS = 30
"""A model that raises does so at most so many operators after it has asked; they make the
message."""
_MOST_ASKED = 1000
"""A place that asks more often in one run gets no answer: it may be a loop that never ends."""
_LIMITS = (
    torch.clamp, torch.clip, torch.nan_to_num, torch.masked_fill,
    Tensor.clamp, Tensor.clip, Tensor.nan_to_num, Tensor.masked_fill,
)  # fmt: skip
"""Functions that pass a gradient of zero on as zero. Others, such as sqrt, may make NaN of it
(0 x inf), and `where` would let that through."""
_CONVERSIONS = (Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__)
_OURS = str(Path(__file__).parents[1]) + os.sep
_TORCH = Path(torch.__file__).parent
_CHECKPOINTS = str(_TORCH / "utils" / "checkpoint.py")
_BETWEEN = (_OURS, str(_TORCH / "_dynamo") + os.sep, str(_TORCH / "_compile.py"))
"""The folders of the functions that run between the model's own and the recorder."""
_Result = TypeVar("_Result")


class TracingError(Exception):
    """Says in its message why the model cannot be traced. Its cause, if any, has the traceback."""


class LossTracingError(TracingError):
    """Says so of what the loss function returns."""


class Unknown:
    """Stands in the text of an exception for what depends on data. It can be shown, and no more."""

    def __repr__(self) -> str:
        return "(data)"

    def __format__(self, _: str) -> str:
        return "(data)"


class _GoesOn(BaseException):
    """Ends a run that has shown that the model goes on with an answer."""


@dataclass(eq=False)
class Questions:
    """What one run of a step asks, and the answers that it is given.

    answers   of each place that has asked so far
    probed    the place whose other answer is tried: the run ends as soon as the model goes on
    refused   a place that is given no answer
    limited   the places that ask whether a tensor is to be limited
    skips     what is to be limited stays as it is
    most_calls   a run that calls more operators ends
    skipped   what has stayed so
    last      the place that asked last
    sites     how often each place has asked
    calls     the operators that have run
    tells_data   the model was given an `Unknown`
    """

    answers: dict[Site, bool]
    probed: Site | None = None
    refused: Site | None = None
    limited: frozenset[Site] = frozenset()
    skips: bool = False
    most_calls: int = sys.maxsize
    skipped: list[Tensor] = field(default_factory=list)
    last: Site | None = None
    calls: int = 0
    goes_on: bool = False
    tells_data: bool = False
    sites: dict[Site, int] = field(default_factory=dict)
    _asked: tuple[Tensor, bool] | None = None

    def called(self) -> None:
        """Note that the step calls an operator."""
        self.calls += 1
        if self.calls > self.most_calls:
            self.end()

    def ask(self, value: Tensor, guess: bool, root: CodeType) -> tuple[int, bool] | None:
        """Return the number of the place that asks for the value's truth, and the answer; `guess`
        if it has none yet. The number is -1 if the step needs no check. None at the refused place.

        root   the function that runs the step
        """
        # The place in the model's code that runs now, below the function `root`, or below a
        # checkpoint: what is computed again asks at the place that asked first.
        frame = sys._getframe(1)
        while frame.f_code.co_filename.startswith(_BETWEEN) and frame.f_back is not None:
            frame = frame.f_back
        texts = tuple(value for value in frame.f_locals.values() if type(value) is str)
        stack: list[Any] = []
        caller: Any = frame
        while caller is not None and caller.f_code is not root:
            if caller.f_code.co_filename == _CHECKPOINTS:
                break
            # A call's number is that of the instruction or of its cache. Their positions are equal.
            place = itertools.islice(caller.f_code.co_positions(), caller.f_lasti // 2, None)
            stack.append((caller.f_code, next(place)))
            caller = caller.f_back
        site: Site = texts, tuple(stack)
        self.sites[site] = self.sites.get(site, 0) + 1
        if site == self.refused or self.sites[site] > _MOST_ASKED:
            return None
        if self.probed is not None:
            if self.may_raise() and site not in self.answers:
                self.end()
            if site == self.probed:
                self.most_calls = min(self.most_calls, self.calls + _MOST_CALLS)
        self.last = site
        answer = self.answers.setdefault(site, guess)
        if site in self.limited:
            self._asked = value, answer
            return -1, answer
        return list(self.answers).index(site), answer

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the function of torch returns for the model."""
        if self._asked is not None and function in _LIMITS and args:
            # The tensor, limited by the function where the truth is as answered.
            (truth, answer), self._asked = self._asked, None
            whole, limited = args[0], function(*args, **kwargs)
            if (limited.shape, limited.dtype) != (whole.shape, whole.dtype):
                return limited
            if self.skips:
                self.skipped.append(whole)
                return whole
            # A truth may be a tensor of shape [1, 1], which would give the result these dimensions.
            truth = truth.reshape(())
            both = (limited, whole) if answer else (whole, limited)
            return torch.where(truth, *both)
        if function is Tensor.__format__ and isinstance(args[0], FakeTensor):
            return str(Unknown())
        try:
            return function(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if not self.may_raise() or function in _CONVERSIONS:
                raise
            self.tells_data = True
            return Unknown()

    def may_raise(self) -> bool:
        """Return True in a run that has tried its answer, so that the model is about to raise."""
        return self.probed is not None and self.probed in self.sites

    def end(self) -> None:
        """End a run that tries an answer, since the model goes on."""
        # The model may catch what is raised here.
        self.goes_on = True
        raise _GoesOn


@dataclass(frozen=True)
class _Raised:
    """What the model raises with one answer: an exception's builtin kind and text."""

    kind: str
    text: str
    calls: int


@dataclass(frozen=True)
class Settled(Generic[_Result]):
    """A run with answers that let the model go on.

    raised   number of a place that asks -> the builtin kind and the text of the exception that the
             model raises with the other answer
    """

    result: _Result
    answers: dict[Site, bool]
    limited: frozenset[Site]
    raised: dict[int, tuple[str, str]]

    def again(self) -> Questions:
        """Return the questions of another run."""
        return Questions(dict(self.answers), limited=self.limited)


def settled(
    run: Callable[[Questions], _Result], same: Callable[[_Result, _Result, list[Tensor]], bool]
) -> Settled[_Result]:
    """Return the run of a step with answers that let the model go on.

    same   says of the results of two runs if they compute the same, and write over none of these
           tensors of the second

    Runs at most three times for each place that asks, and once more. Raises what the run raises.
    Where both answers let the model go on, or what one does cannot be found out, the place that
    asks gets no answer.
    """
    raised: dict[Site, _Raised] = {}
    questions, outcome = _guessed(run, raised)
    answers, limited = questions.answers, list[Site]()
    unknown = [site for site in questions.sites if site not in raised]
    for site in unknown:
        other = {**answers, site: not answers[site]}
        probe = Questions(dict(other), probed=site)
        try:
            run(probe)
        except _GoesOn:
            pass
        except Exception as error:
            is_of_unknown = probe.tells_data and isinstance(error, (TypeError, AttributeError))
            if not (probe.goes_on or is_of_unknown) and _raised_by_model(error):
                raised[site] = _told(error, probe.calls)
                continue
        # An answer may let the model loop for ever.
        most = 2 * questions.calls + _MOST_CALLS
        trial = Questions(other, limited=frozenset([site]), skips=True, most_calls=most)
        is_limit = False
        if not isinstance(outcome, Exception):
            # Without what is to be limited the step must give the same as without the branch, and
            # must not ask anything new.
            known = len(trial.answers)
            try:
                found = run(trial)
            except (Exception, _GoesOn):
                pass
            else:
                is_limit = len(trial.answers) == known and same(outcome, found, trial.skipped)
        if not is_limit:
            _refuse(run, answers, site)
        limited.append(site)
    if isinstance(outcome, Exception):
        raise outcome
    answers |= {site: not answers[site] for site in limited}
    # The step must leave behind what this run does, and not what a trial did.
    if unknown:
        questions = Questions(answers, limited=frozenset(limited))
        outcome = run(questions)
        for site in questions.sites:
            if site not in raised and site not in limited:
                _refuse(run, answers, site)
    of_number = {
        number: (raised[site].kind, raised[site].text)
        for number, site in enumerate(answers)
        if site in raised
    }
    return Settled(outcome, answers, frozenset(limited), of_number)


def _refuse(run: Callable[[Questions], object], answers: dict[Site, bool], site: Site) -> None:
    """Raise what a run raises at a place that gets no answer."""
    run(Questions(answers, refused=site))
    raise TracingError(
        "the model asks whether a tensor is true, goes on with either answer, and catches the "
        "error that a refusal is; decide on shapes or on Python values, or use torch.where"
    )


def _guessed(
    run: Callable[[Questions], _Result], raised: dict[Site, _Raised]
) -> tuple[Questions, _Result | Exception]:
    """Return a run with answers of which none lets the model raise, its questions and its result,
    or what it raises whatever is answered. `raised` gets what the model raises on the way."""
    answers: dict[Site, bool] = {}
    while True:
        questions = Questions(answers)
        try:
            return questions, run(questions)
        except Exception as error:
            site = questions.last
            if site is None or not _raised_by_model(error):
                return questions, error
            if questions.sites[site] > 1:
                # The model went on with this answer before.
                return questions, error
            before = raised.get(site)
            if before is not None and questions.calls > before.calls + _MOST_CALLS:
                return questions, error
            answers[site] = not answers[site]
            if before is not None:
                # Both answers lead to an error, and the first is as likely the reason.
                run(Questions(answers))
            raised[site] = _told(error, questions.calls)


def _raised_by_model(error: BaseException) -> bool:
    """Return True if a `raise` or `assert` of Python code has raised the exception, for a reason
    that is none of fake tensors alone."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    code = trace.tb_frame.f_code
    if code.co_filename.startswith(_OURS) or isinstance(error, NotImplementedError):
        return False
    if type(error).__module__.startswith(("torch._subclasses", "torch.fx")):
        return False
    return dis.opname[code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"


def _told(error: BaseException, calls: int) -> _Raised:
    """Return the exception as a check op raises it: of a builtin class, since a worker may not have
    the model's own."""
    kind = next(c for c in type(error).__mro__ if getattr(builtins, c.__name__, None) is c)
    text = text_of(error).replace("FakeTensor(", "tensor(").replace("FakeTensor", "Tensor")
    text = text or location_of(error)
    if kind is not type(error):
        text = f"{type(error).__name__}: {text}"
    try:
        kind(text)
    except TypeError:
        kind = RuntimeError
    # The text goes through C++, which takes valid UTF-8 alone.
    return _Raised(kind.__name__, text.encode(errors="replace").decode(), calls)
