"""Stages are measured by a stub: what a stage takes is a rule of its kernels."""

import itertools
import random
from types import MappingProxyType

import pytest
import torch

from dovetail.costs import CostCache
from dovetail.costs.cache import MeasuredCost
from dovetail.executors.stages import measuring
from dovetail.executors.stages.measuring import CpuStages
from dovetail.schedulers.dos import dos
from dovetail.schedulers.records import KernelBlock, groups_of, members
from tests.support.dags import random_block

#   0   1
#   |   |
#   2   3     4
TWINS = KernelBlock((0, 0, 0b1, 0b10, 0))
SIGNATURES = ["conv", "conv", "pool", "pool", "pool"]
NO_KEYS = (None,) * 5


class _Functions:
    """Stands for functions that are never run."""

    def __init__(self):
        self.example = {}


class Stages(CpuStages):
    """Takes `one` [signature] seconds on one thread; two threads halve what one takes, but for what
    is in `whole`. Kernels together overlap for `overlap` of their time; merged ones take `merged`
    of it."""

    one = MappingProxyType({"conv": 4.0, "pool": 1.0})
    whole = frozenset()
    overlap, merged_share, cold = 0.5, 0.25, 1
    interrupt_at = 10**9

    def __init__(self, cache, block=TWINS, signatures=SIGNATURES, keys=NO_KEYS, **options):
        self.measured = []
        options = {"device": "cpu", "threads": 2} | options
        super().__init__(_Functions(), block, signatures, keys, cache, **options)

    def _of(self, kernels):
        return sum(self.one[self._signatures[k]] for k in kernels)

    def _note(self, what):
        self.measured.append(what)
        if len(self.measured) >= self.interrupt_at:
            raise KeyboardInterrupt

    def _in_passes(self, threads):
        self._note(threads)
        found = {}
        for signature in dict.fromkeys(self._signatures):
            share = 1 if threads == 1 or signature in self.whole else 1 / threads
            found[signature] = MeasuredCost(self.one[signature] * share, 0.0)
        return found

    def _switching(self):
        return MeasuredCost(0.01, 0.0)

    def measure_stages(self, stages):
        return [self._measure(*stage) for stage in stages]

    def _measure(self, groups, merged):
        self._note((merged, tuple(map(tuple, groups))))
        kernels = [k for group in groups for k in group]
        seconds = self._of(kernels)
        if len(kernels) == 1:
            return MeasuredCost(seconds / self.cold, 0.0)
        return MeasuredCost(seconds * (self.merged_share if merged else self.overlap), 0.0)


class Whole(Stages):
    """All threads win nothing for one kernel by itself, so that stages can."""

    whole = frozenset(["conv", "pool"])


@pytest.fixture
def cache(tmp_path):
    return CostCache(tmp_path / "costs.sqlite")


def everything(block):
    return [stage for stage in range(1, 1 << len(block)) if stage & (stage - 1)]


def test_kernels_of_one_signature_are_measured_once_on_one_thread_and_on_all(cache):
    stages = Stages(cache)
    # Passes over all kernels, on so many threads; then each over and over.
    assert stages.measured == [1, 2, (False, ((2,),)), (False, ((0,),))]
    assert stages.alone.one_thread == [4, 4, 1, 1, 1]
    assert stages.alone.all_threads == [2, 2, 0.5, 0.5, 0.5]
    assert stages.alone.switching == 0.01
    assert stages.asked == stages.timed == 7  # of each kernel three; switching


def test_each_distinct_stage_is_measured_once_and_later_runs_measure_nothing(cache):
    stages = Whole(cache)
    before = len(stages.measured)
    found = stages.timer(everything(TWINS))
    again = stages.timer(everything(TWINS))
    assert again == found
    measured = stages.measured[before:]
    # conv + conv; conv + pool apart, in a chain; ... : equal ones are looked up
    assert len(measured) < len(everything(TWINS))
    assert len(set(measured)) == len(measured) == stages.timed - 7
    assert stages.asked == stages.timed
    later = Whole(cache)
    assert later.timer(everything(TWINS)) == found
    assert (later.timed, later.measured) == (0, [])
    assert later.asked == stages.asked
    assert dos(TWINS, later.bounded) == dos(TWINS, Whole(cache).bounded)


def test_single_kernels_take_the_faster_of_one_thread_and_all(cache):
    assert [t.seconds for t in Stages(cache).timer([0b1, 0b100])] == [2, 0.5]
    assert [t.seconds for t in Whole(cache).timer([0b1, 0b100])] == [2, 0.5]  # as was kept


@pytest.mark.parametrize("change", [{"device": "gpu"}, {"threads": 4}])
def test_what_was_measured_elsewhere_counts_for_nothing(cache, change):
    Whole(cache).timer([0b11])
    other = Whole(cache, **change)
    other.timer([0b11])
    assert other.timed == other.asked > 0


@pytest.mark.parametrize("name", ["version", "protocol"])
def test_another_torch_or_way_to_measure_starts_anew(cache, name, monkeypatch):
    Whole(cache).timer([0b11])
    if name == "version":
        monkeypatch.setattr(torch, "__version__", "9.9.9")
    else:
        monkeypatch.setattr(measuring, "PROTOCOL", -1)
    other = Whole(cache)
    other.timer([0b11])
    assert other.timed == other.asked == 8


def test_a_stage_that_cannot_win_is_not_measured_and_never_chosen(cache):
    for seed in range(20):
        rng = random.Random(seed)
        block = random_block(rng, 8, 0.2)
        signatures = [rng.choice(["conv", "pool"]) for _ in range(8)]
        stages = Stages(cache, block, signatures, (None,) * 8, device=str(seed))
        before = len(stages.measured)
        found = dos(block, stages.bounded)
        # Two threads halve every kernel, so that no stage can beat them one by one.
        assert stages.measured[before:] == []
        assert all(stage & (stage - 1) == 0 for stage in found.stages)
        for stage, timing in zip(everything(block), stages.bounded(everything(block)), strict=True):
            assert timing.seconds > sum(stages.alone.best(k) for k in members(stage))


def test_a_stage_is_slower_in_a_step_by_as_much_as_its_kernels_are(cache):
    class Cold(Whole):
        cold = 2  # they take half when they run over and over

    warm, cold = Whole(cache), Cold(cache, device="another")
    stages = [0b00011, 0b01111, 0b01000]
    of_warm, of_cold = warm.timer(stages), cold.timer(stages)
    assert [t.seconds for t in of_warm] == [4.0, 5.0, 1.0]
    assert [t.seconds for t in of_cold] == [8.0, 10.0, 1.0]


def test_where_threads_win_nothing_the_bound_lets_even_stages_through(cache):
    stages = Whole(cache)
    before = len(stages.measured)
    even, uneven = 0b00011, 0b10001  # conv + conv; conv + pool: 4 of 5 s at best
    chain = 0b00101  # one group: no faster than its kernels
    found = stages.bounded([even, uneven, chain])
    assert len(stages.measured) - before == 2
    assert [t.seconds for t in found[:2]] == [4.0, 2.5]
    assert found[2].seconds == pytest.approx(5.0)
    assert found[2].seconds > 5.0
    # Asked for without the bound, it is measured.
    assert stages.timer([chain])[0].seconds == 2.5


KEYS = ("one input", "one input", None, None, None)


def test_kernels_that_can_merge_are_measured_merged_too(cache):
    stages = Whole(cache, keys=KEYS)
    before = len(stages.measured)
    merged, apart = stages.timer([0b00011, 0b01100])
    assert (merged.seconds, merged.merged) == (2.0, True)
    assert (apart.seconds, apart.merged) == (1.0, False)
    assert stages.measured[before:] == [
        (False, ((0,), (1,))),
        (True, ((0, 1),)),
        (False, ((2,), (3,))),
    ]


def test_merging_that_is_slower_is_left(cache):
    stages = Whole(cache, keys=KEYS)
    stages.merged_share = 0.6
    assert stages.timer([0b11])[0].merged is False


def test_equal_kernels_of_another_input_do_not_pass_for_merged(cache):
    block = KernelBlock((0,) * 4)
    keys = ("one", "one", "two", None)
    stages = Whole(cache, block, ["conv"] * 4, keys)
    found = stages.timer([0b0011, 0b0101, 0b1001, 0b1100])
    assert [timing.merged for timing in found] == [True, False, False, False]
    assert [timing.seconds for timing in found] == [2.0, 4.0, 4.0, 4.0]
    # and the other way round: what is known of apart is not all that is known of merged
    again = Whole(cache, block, ["conv"] * 4, ("a", "b", "b", "a"))
    assert [t.merged for t in again.timer([0b0011, 0b0110, 0b1001])] == [False, True, True]
    assert again.timed == 0


def test_what_can_merge_is_measured_even_where_it_cannot_win_side_by_side(cache):
    stages = Stages(cache, keys=KEYS)
    assert stages.bounded([0b00011])[0].merged
    assert not stages.bounded([0b01100])[0].merged


def test_an_interrupt_keeps_what_was_measured(cache):
    wide = KernelBlock((0,) * 40)
    names = [f"kernel {i}" for i in range(40)]

    class Many(Whole):
        one = dict.fromkeys(names, 1.0)
        whole = frozenset(names)

    pairs = [1 << i | 1 << j for i in range(40) for j in range(i)][:60]
    first = Many(cache, wide, names, (None,) * 40)
    first.interrupt_at = len(first.measured) + 38
    threads = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        first.timer(pairs)
    assert torch.get_num_threads() == threads
    second = Many(cache, wide, names, (None,) * 40)
    assert second.timed == 0
    second.timer(pairs)
    assert second.timed == 60 - 32  # what was measured together is kept together
    first.interrupt_at = 10**9
    first.timer(pairs)  # the same object goes on too
    assert first.timed == 121 + 32


def test_progress_is_told(cache):
    told = []
    stages = Whole(cache, progress=lambda doing, fraction: told.append((doing, fraction)))
    told.clear()
    stages.timer([0b11, 0b1100])
    assert told == [("measuring stages", 1.0)]
    told.clear()
    wide = Whole(
        cache,
        KernelBlock((0,) * 40),
        ["conv"] * 40,
        (None,) * 40,
        device="wide",
        progress=stages._progress,
    )
    wide.timer([(1 << i) - 1 for i in range(2, 41)])
    assert [fraction for _, fraction in told[-3:]] == [16 / 39, 32 / 39, 1.0]


def test_groups_of_a_stage_are_its_connected_kernels(cache):
    stages = Whole(cache)
    before = len(stages.measured)
    stages.timer([0b01111])
    groups = tuple(tuple(members(group)) for group in groups_of(TWINS, 0b01111))
    assert stages.measured[before:] == [(False, groups)]
    assert groups == ((0, 2), (1, 3))


@pytest.mark.parametrize(("expected", "doubtful"), [(2.0, True), (3.0, False)])
def test_what_starting_a_stages_threads_takes_is_no_part_of_it(expected, doubtful, monkeypatch):
    """They take 100 seconds to start, at times more, and 3 a pass."""
    now, starts = [0.0], itertools.cycle([100.0, 100.0, 100.0, 100.0, 170.0, 190.0])

    class Starting:
        def run(self, passes=1):
            now[0] += next(starts) + 3.0 * passes

    monkeypatch.setattr(measuring, "_SAMPLE_SECONDS", 20.0)
    loop = measuring._StageLoop(Starting(), expected, lambda: now[0])
    for _ in range(8):
        loop.visit()
    assert loop.measured.seconds == pytest.approx(3.0)
    assert loop.is_doubtful == doubtful
