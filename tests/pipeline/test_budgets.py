"""A budget of seconds is the whole of planning, and what was found within it is found again."""

import pytest
import torch

import dovetail as dt
from dovetail.cli import output
from dovetail.pipeline import planning, sources
from dovetail.pipeline.kept import is_better, kept_path, kept_plan
from dovetail.pipeline.planning import with_times
from dovetail.pipeline.requests import PlanRequest
from dovetail.pipeline.sources import SENTENCE
from dovetail.plans import COMPILED, EAGER
from dovetail.runtime.timers import Deadline, Repeats
from tests.support.placing import plan_for, random_placement
from tests.support.small_models import branches

GPUS = "2 x p100"


@pytest.fixture(scope="module")
def step():
    module, inputs = branches()
    return dt.capture(module, *inputs)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path))
    return tmp_path


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_each_phase_has_its_part_of_what_is_left_and_what_one_leaves_goes_on():
    clock = Clock()
    deadline = Deadline(12.0, {"measuring": 3, "searching": 3, "compiling": 6}, clock=clock)
    with deadline.phase("measuring") as part:
        assert part.left_seconds == 3.0
        clock.now = 4.0
        assert part.is_over and not part.within(5.0)
    with deadline.phase("searching") as part:
        assert part.left_seconds == pytest.approx(8 / 3)
        clock.now = 5.0
        with deadline.phase("measuring"):  # of another candidate
            clock.now = 6.0
    with deadline.phase("compiling") as part:
        assert part.left_seconds == 6.0
        clock.now = 20.0
    assert deadline.is_over and deadline.within(1.0) == 0.0
    assert deadline.spent == {"measuring": 5.0, "searching": 1.0, "compiling": 14.0}
    # One that is no part of the budget may take what is left, and without a limit that is no end.
    with Deadline(10.0, {"searching": 1}, clock=Clock()).phase("comparing") as part:
        assert part.left_seconds == 10.0
    with Deadline().phase("measuring") as part:
        assert part.left_seconds == float("inf") and part.within(2.0, 0.1) == 2.0


@pytest.mark.parametrize(("left_seconds", "is_beside"), [(39.0, True), (41.0, False)])
def test_the_runner_is_built_within_the_budget_or_beside_it(left_seconds, is_beside, monkeypatch):
    called, notes = [], sources.Notes()

    def build_native(_tell, meanwhile, *, anew):
        meanwhile()
        return called.append(("within", anew)) or "no compiler"

    monkeypatch.setattr(sources, "build_native", build_native)
    monkeypatch.setattr(sources, "build_beside", lambda: called.append("beside"))
    sources.prepare_runner(
        lambda *_: None,
        notes,
        meanwhile=lambda: called.append("search"),
        left_seconds=left_seconds,
    )
    assert called == ["beside"] * is_beside + ["search", ("within", not is_beside)]
    assert notes.texts == (f"{sources.FROM_PYTHON}: no compiler",)


def test_a_plan_sets_up_for_a_search_where_there_are_several_devices(step, monkeypatch):
    asked = []

    def prepare_runner(_tell, _notes, *, meanwhile, left_seconds):
        asked.append((meanwhile is planning.compile_search, left_seconds > 25))
        raise KeyboardInterrupt

    monkeypatch.setattr(planning, "prepare_runner", prepare_runner)
    for machine, budget in (("here", "50s"), ("here/1", "20s"), ("here/2", "30s")):
        with pytest.raises(KeyboardInterrupt):
            planning.find_plan(PlanRequest(step, machine, budget=budget))
    assert asked == [(False, True), (False, False), (True, True)]


def test_repeats_end_at_the_latest_with_one():
    repeats = Repeats(32, 3, 20.0, latest=5.0)
    assert not repeats.are_done(0, 9.0)
    assert repeats.are_done(1, 5.0)
    assert not repeats.are_done(2, 4.0)


def test_what_was_not_reached_is_the_first_note_and_what_it_took_the_last(step):
    clock = Clock()
    plan = plan_for(step, random_placement(step.graph, 0)).noted("a note")
    deadline = Deadline(3.0, clock=clock)
    with deadline.phase("searching"):
        clock.now = 2.0
    assert with_times(plan, deadline, 2.0).notes == (
        "a note", "of a budget of 3 s planning took 2 s: searching 2 s",
    )  # fmt: skip
    deadline.missed += ["torch.compile", "torch.compile"]
    first, *_, last = with_times(plan, deadline, 5.0).notes
    assert first == "not reached within 3 s: torch.compile; --again goes on from here"
    assert last.endswith("searching 2 s; besides 3 s for what is set up once")
    assert with_times(plan, Deadline(), 2.0).notes == ("a note",)


def test_a_plan_is_found_again_until_it_is_searched_for_again(step, own_cache, monkeypatch):
    real, searched = planning.candidates, []
    monkeypatch.setattr(
        planning, "candidates", lambda *given: searched.append(given) or real(*given)
    )
    first = dt.plan(step, GPUS, budget="0.3s")
    again = dt.plan(step, GPUS, budget="0.3s")
    assert len(searched) == 1
    assert again.value == first.value and (again.placement == first.placement).all()
    assert again.notes == (*first.notes, planning.FOUND_BEFORE)
    assert again.graph.fingerprint == first.graph.fingerprint
    # Another request, another step and a budget of evaluations are searched for.
    dt.plan(step, GPUS, budget="0.3s", pins=[("left.0", "p100:0")])
    module, inputs = branches()
    with torch.no_grad():
        module.left[0].weight.mul_(2)
    dt.plan(dt.capture(module, inputs[0][:4]), GPUS, budget="0.3s")
    dt.plan(step, GPUS, budget="5e")
    dt.plan(step, GPUS, budget="5e")
    assert len(searched) == 5
    on = dt.plan(step, GPUS, budget="0.3s", again=True)
    assert len(searched) == 6
    assert on.value <= first.value
    assert on.seed in (first.seed, first.seed + 1)


def test_a_file_that_is_damaged_or_that_others_can_write_counts_as_missing(step, own_cache):
    request = PlanRequest(step, GPUS, budget="0.3s")
    dt.plan(step, GPUS, budget="0.3s")
    path = kept_path(request)
    assert path.parent.parent == own_cache and path.stat().st_mode & 0o777 == 0o600
    assert kept_plan(path, step) is not None
    path.chmod(0o666)
    assert kept_plan(path, step) is None
    path.chmod(0o600)
    path.write_text(path.read_text().replace('"value":', '"value":1'))
    assert kept_plan(path, step) is None
    path.write_text("no JSON")
    assert kept_plan(path, step) is None
    assert dt.plan(step, GPUS, budget="0.3s").notes[-1] != planning.FOUND_BEFORE


@pytest.mark.parametrize("options", [{"budget": "5e"}, {"place": {"left": 0}}, {"method": min}])
def test_what_depends_on_more_than_the_request_is_not_kept(step, options):
    assert kept_path(PlanRequest(step, GPUS, **options)) is None
    assert kept_path(PlanRequest(step.graph, GPUS)) is None


def test_of_two_plans_that_counts_which_took_less_of_its_own_eager_step(step):
    from dataclasses import replace

    plan = plan_for(step, random_placement(step.graph, 0))
    fast = replace(plan, value=9.0, way=COMPILED, measured={EAGER: 2.0, COMPILED: 1.0})
    slow = replace(plan, value=1.0, way=EAGER, measured={EAGER: 1.0})
    assert is_better(fast, slow) and not is_better(slow, fast)
    assert is_better(slow, replace(plan, value=0.1))
    assert not is_better(replace(plan, value=0.1), slow)
    # Of equal ones the later counts, whose notes tell of more.
    assert not is_better(replace(plan, value=1.0), replace(plan, value=1.0))


def test_a_quick_plan_has_ten_seconds_and_compiles_nothing(step):
    assert PlanRequest(step).whole_seconds == 60.0
    quick = PlanRequest(step, quick=True)
    assert (quick.whole_seconds, quick.compile_seconds) == (10.0, 0.0)
    assert PlanRequest(step, quick=True, budget="20s").whole_seconds == 20.0
    assert PlanRequest(step, budget="20e").whole_seconds == float("inf")


def test_lines_of_progress_come_once_for_each_thing_and_sentences_at_once(monkeypatch, capsys):
    monkeypatch.setattr(output, "QUIET_SECONDS", 0.0)
    with output.progress_bar() as progress:
        for number in range(5):
            progress(f"measuring ops: {number} of 5 kinds on here", number / 5, None)
            progress("grouping ops", 0.5, None)
            progress("with channels last: grouping ops", 0.6, None)
        progress("one step takes 160 us: placement can hardly help", SENTENCE, None)
    lines = [line.split("s ", 1)[1].strip() for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        "measuring ops: 0 of 5 kinds on here",
        "50 %  grouping ops",
        "one step takes 160 us: placement can hardly help",
    ]
