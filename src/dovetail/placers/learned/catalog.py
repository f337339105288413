"""The learned methods by name. Imports torch; whoever needs only names does not need this."""

from typing import Any

from dovetail.errors import UsageError
from dovetail.placers.learned import gdp, hdp, seq2seq
from dovetail.placers.learned.policy import Policy
from dovetail.placers.learned.records import LearningSettings, ProblemView

LEARNED: dict[str, tuple[type[Policy], LearningSettings]] = {
    "seq2seq": (seq2seq.Seq2Seq, seq2seq.SETTINGS),
    "hdp": (hdp.Hdp, hdp.SETTINGS),
    "gdp": (gdp.Gdp, gdp.SETTINGS),
}


def make_policy(name: str, view: ProblemView, seed: int = 0, **options: Any) -> Policy:
    """A fresh policy of that method for a view. Raises `UsageError` for an unknown name."""
    policy: Policy = _method(name)[0].for_view(view, seed=seed, **options)  # type: ignore[attr-defined]
    return policy


def settings_of(name: str, *, finetuned: bool = False) -> LearningSettings:
    """How that method is trained, afresh or from a policy that was trained on other graphs. Raises
    `UsageError` for an unknown name."""
    settings = _method(name)[1]
    return gdp.FINETUNING if finetuned and name == "gdp" else settings


def _method(name: str) -> tuple[type[Policy], LearningSettings]:
    if name not in LEARNED:
        raise UsageError("method", f"{name!r} is not one of {', '.join(LEARNED)}")
    return LEARNED[name]
