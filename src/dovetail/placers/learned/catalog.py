"""The learned methods by name. Imports torch; whoever needs only names does not need this."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from dovetail.errors import UsageError
from dovetail.placers.learned import gdp, hdp, seq2seq
from dovetail.placers.learned.policy import Policy
from dovetail.placers.learned.records import LearningSettings, ProblemView


class LearnedMethod(NamedTuple):
    """A method's policy, how it is trained, and options of the policy that make it this method."""

    policy: type[Policy]
    settings: LearningSettings
    options: Mapping[str, Any] = MappingProxyType({})


LEARNED: dict[str, LearnedMethod] = {
    "seq2seq": LearnedMethod(seq2seq.Seq2Seq, seq2seq.SETTINGS),
    "seq2seq-paper": LearnedMethod(seq2seq.Seq2SeqPaper, seq2seq.PAPER_SETTINGS),
    "hdp": LearnedMethod(hdp.Hdp, hdp.SETTINGS),
    "hdp-paper": LearnedMethod(hdp.Hdp, hdp.PAPER_SETTINGS, hdp.PAPER),
    "gdp": LearnedMethod(gdp.Gdp, gdp.SETTINGS),
    "gdp-paper": LearnedMethod(gdp.GdpPaper, gdp.PAPER_SETTINGS),
}


def make_policy(name: str, view: ProblemView, seed: int = 0, **options: Any) -> Policy:
    """A fresh policy of that method for a view. Raises `UsageError` for an unknown name."""
    method = _method(name)
    return method.policy.for_view(view, seed=seed, **{**method.options, **options})


def settings_of(name: str, *, finetuned: bool = False) -> LearningSettings:
    """How that method is trained, afresh or from a policy that was trained on other graphs. Raises
    `UsageError` for an unknown name."""
    settings = _method(name).settings
    return gdp.FINETUNING if finetuned and name == "gdp" else settings


def _method(name: str) -> LearnedMethod:
    if name not in LEARNED:
        raise UsageError("method", f"{name!r} is not one of {', '.join(LEARNED)}")
    return LEARNED[name]
