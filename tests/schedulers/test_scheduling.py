import random
from dataclasses import replace

import pytest

from dovetail.graph.kernels import fuse
from dovetail.methods import SCHEDULERS
from dovetail.pipeline import resolve_model
from dovetail.schedulers.blocks import cut, narrowed
from dovetail.schedulers.dataflow import dataflow, replayed
from dovetail.schedulers.dos import endings_of
from dovetail.schedulers.ios import ios
from dovetail.schedulers.races import check_races
from dovetail.schedulers.records import KernelBlock, StageTiming, groups_of, members
from dovetail.schedulers.scheduling import MOST_STATES, StageProblem, sequential
from dovetail.schedulers.states import states_of
from dovetail.schedulers.timing import block_of, key_of, signatures_of
from tests.support.dags import random_block


class Table:
    """Seconds by what a stage depends on, as devices are: equal stages cost the same."""

    def __init__(self, block, signatures, keys, seed):
        self.block, self.signatures, self.keys, self.seed = block, signatures, keys, seed
        self.asked = []

    def __call__(self, stages):
        self.asked += stages
        return [self.of(stage) for stage in stages]

    def of(self, stage):
        key = key_of(self.block, stage, self.signatures)
        seconds = random.Random(f"{self.seed} {key}").uniform(0.3, 1.0) * stage.bit_count()
        kinds = {self.keys[op] for op in members(stage)}
        if stage.bit_count() > 1 and len(kinds) == 1 and kinds != {None}:
            return StageTiming(0.5 * seconds, merged=True)
        return StageTiming(seconds)


def problem_of(seed, ops=12, share=0.25):
    rng = random.Random(seed)
    block = random_block(rng, ops, share)
    signatures = [rng.choice("abc") for _ in range(ops)]
    # Of one key are ops that read the same.
    keys = [
        f"{signature} {before}" if signature != "c" else None
        for signature, before in zip(signatures, block.predecessors, strict=True)
    ]
    table = Table(block, signatures, keys, seed)
    seconds = [table.of(1 << op).seconds for op in range(ops)]
    return StageProblem(block, signatures, table, table, keys, rng.randrange(1, 4), seconds, 0.01)


def unmerged(problem):
    keys = (None,) * len(problem.block)
    table = Table(problem.block, problem.signatures, keys, problem.timer.seed)
    return replace(problem, keys=keys, timer=table, bounded=table)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_kernel_once_and_no_edge_backwards(name, seed):
    problem = problem_of(seed)
    block = problem.block
    found = SCHEDULERS[name](problem)
    if found.streams is not None:
        check_races(block, found.streams)
        assert len(found.streams.orders) <= problem.streams
        return
    done = 0
    for stage in found.stages:
        ops = sum(1 << kernel for kernel in stage.kernels)
        assert not ops & done
        if stage.merged:
            assert len(stage.groups) == 1
            assert len({problem.keys[kernel] for kernel in stage.kernels}) == 1
            assert problem.keys[stage.kernels[0]] is not None
        else:
            assert [sum(1 << k for k in g) for g in stage.groups] == groups_of(block, ops)
        for group in stage.groups:
            assert list(group) == sorted(group)
        for kernel in stage.kernels:
            assert not block.predecessors[kernel] & ~(done | ops)
        assert stage.seconds == problem.timer.of(ops).seconds
        done |= ops
    assert done == block.everything
    assert found.seconds == pytest.approx(sum(stage.seconds for stage in found.stages))
    assert [k for own in found.blocks for k in own] == sorted(range(len(block)))
    assert found.seconds == pytest.approx(sum(found.block_seconds))
    assert found.pruning == ""


@pytest.mark.parametrize("seed", range(20))
def test_optimal_stages_are_no_slower_than_any_other(seed):
    problem = problem_of(seed)
    seconds = {name: SCHEDULERS[name](problem).seconds for name in SCHEDULERS}
    slack = 1e-9
    assert seconds["dos"] <= min(seconds["sequential"], seconds["greedy"]) + slack
    assert seconds["merge"] <= seconds["sequential"] + slack
    assert seconds["merge"] >= seconds["dos"] - slack
    one = replace(problem, group_ops=1, groups=len(problem.block))
    assert SCHEDULERS["ios"](one).seconds == pytest.approx(seconds["dos"])
    before = float("inf")
    for pruned in ((1, 2), (2, 2), (2, 3), (3, 8)):
        found = SCHEDULERS["ios"](replace(problem, group_ops=pruned[0], groups=pruned[1]))
        for stage in found.stages:
            if not stage.merged:
                assert len(stage.groups) <= pruned[1]
                assert max(map(len, stage.groups)) <= pruned[0]
        assert found.seconds <= before + slack
        before = found.seconds


def repeated(block, times):
    """Copies of a block one after another, each of whose first op reads the last of all before."""
    before = []
    for copy in range(times):
        start = copy * (len(block) + 2)
        before.append(1 << start - 1 if copy else 0)  # fork
        inner = [start + 1 + op for op in range(len(block))]
        for op in range(len(block)):
            own = sum(1 << inner[p] for p in members(block.predecessors[op]))
            before.append(own or 1 << start)
        ends = [op for op in range(len(block)) if not block.successors[op]]
        before.append(sum(1 << inner[op] for op in ends) or 1 << start)  # join
    return KernelBlock(tuple(before))


@pytest.mark.parametrize("name", ["dos", "ios", "greedy", "merge"])
@pytest.mark.parametrize("seed", range(5))
def test_equal_parts_are_searched_once_and_scheduled_as_if_each_was(name, seed):
    rng = random.Random(seed)
    block = repeated(random_block(rng, 6, 0.2), 3)
    own = [rng.choice("ab") for _ in range(6)]
    signatures = ["fork", *own, "join"] * 3
    keys = [
        f"{s} {before}" if s in "ab" else None
        for s, before in zip(signatures, block.predecessors, strict=True)
    ]
    table = Table(block, signatures, keys, seed)
    problem = StageProblem(block, signatures, table, table, keys, 2, [1.0] * len(block))
    found = SCHEDULERS[name](problem)
    shared = len(table.asked)
    # Told apart, each part is searched: same seconds.
    table.asked.clear()
    apart = [f"{s} {i // 8}" for i, s in enumerate(signatures)]
    each = SCHEDULERS[name](replace(problem, signatures=apart))
    assert found.seconds == pytest.approx(each.seconds)
    assert [s.kernels for s in found.stages] == [s.kernels for s in each.stages]
    assert [s.merged for s in found.stages] == [s.merged for s in each.stages]
    assert found.blocks == each.blocks
    assert shared < len(table.asked)
    assert found.states < each.states or name in ("greedy", "merge")


def test_parts_are_told_apart_by_what_may_merge():
    # Two forks of two equal ops; of the second the ops read two different views.
    block = KernelBlock((0, 0b1, 0b1, 0b110, 1 << 3, 1 << 3, 0b110000))
    signatures = ["end", "conv", "conv", "end", "conv", "conv", "end"]
    keys = [None, "a", "a", None, "b", "c", None]
    table = Table(block, signatures, keys, 0)
    found = SCHEDULERS["merge"](StageProblem(block, signatures, table, table, keys, 2, [1.0] * 7))
    assert [(s.kernels, s.merged) for s in found.stages if s.merged] == [((1, 2), True)]


@pytest.mark.parametrize("seed", range(30))
def test_seconds_of_streams_are_those_of_running_them(seed):
    rng = random.Random(seed)
    block = random_block(rng, 25, rng.choice([0.05, 0.15, 0.4]))
    seconds = [rng.random() for _ in range(25)]
    wait = rng.choice([0.0, 0.1, 1.0])
    streams, predicted = dataflow(block, seconds, rng.randrange(1, 6), wait)
    # Simulated event by event: each stream runs its next op once its events have come.
    waits = {op: [event for event, waiting in streams.waits if waiting == op] for op in range(25)}
    ended, left = {}, [list(order) for order in streams.orders]
    free = [0.0] * len(left)
    while any(left):
        for stream, order in enumerate(left):
            while order and all(event in ended for event in waits[order[0]]):
                op = order.pop(0)
                start = max([free[stream], *(ended[event] + wait for event in waits[op])])
                free[stream] = ended[op] = start + seconds[op]
    assert max(ended.values()) == pytest.approx(predicted)
    assert replayed(block, streams, seconds, wait) == pytest.approx(predicted)


def test_waiting_keeps_ops_on_one_stream_where_events_cost_more_than_they_win():
    fork = KernelBlock((0, 0b1, 0b1, 0b110))
    cheap, _ = dataflow(fork, [1.0] * 4, 2, 0.1)
    dear, seconds = dataflow(fork, [1.0] * 4, 2, 5.0)
    assert (len(cheap.orders), len(dear.orders), seconds) == (2, 1, 4.0)


def test_a_window_is_kept_only_where_a_part_needs_it():
    # A wide part, a narrow one, a wider one.
    before = [0, *[0b1] * 9]
    join = len(before)
    before.append(sum(1 << op for op in range(1, join)))
    before += [1 << join] * 3
    second = len(before)
    before.append(sum(1 << op for op in range(join + 1, second)))
    before += [1 << second] * 12
    block = KernelBlock(tuple(before))
    found = narrowed(block, 100)
    widths = {
        len(part.ops): window for part, window in zip(found.parts, found.windows, strict=True)
    }
    assert widths[3 + 1] == 0
    assert widths[9 + 1] > widths[12] > 0
    assert found.pruning == f"a window of {widths[12]} ops"
    for part, window in zip(found.parts, found.windows, strict=True):
        assert len(states_of(part.block, window)) <= 100


@pytest.mark.parametrize("name", SCHEDULERS)
def test_nothing_is_scheduled_of_nothing(name):
    found = SCHEDULERS[name](
        StageProblem(KernelBlock(()), [], lambda _: [], lambda _: [], [], 2, [])
    )
    assert (found.seconds, found.stages) == (0, ())


def parts_of(model):
    """(whole block, its signatures, parts that `dos` searches) of a network of the zoo."""
    graph = resolve_model(f"zoo:{model}", "").graph
    kernels = fuse(graph)
    block = block_of(graph, kernels)
    return block, signatures_of(graph, kernels), narrowed(block, MOST_STATES["dos"])


@pytest.mark.parametrize(
    ("model", "kernels", "states", "transitions", "most"),
    [
        ("squeezenet_1_0?batch=1", 38, 46, 62, 0.83),
        ("inception_v3?batch=1", 124, 1_351, 10_921, 0.6),
        ("randwire?batch=1", 103, 38_716, 2_695_000, 0.1),
        ("nasnet_a_large?batch=1", 485, 118_069, 5_100_000, 0.1),
    ],
)
def test_stages_of_the_papers_networks_repeat(model, kernels, states, transitions, most):
    block, signatures, kept = parts_of(model)
    assert len(block) == kernels
    assert set(kept.windows) == {0}
    compared, found, distinct = 0, 0, set()
    for part in kept.parts:
        own = [signatures[op] for op in part.ops]
        numbers = {s: i for i, s in enumerate(dict.fromkeys(signatures))}
        of_part = [numbers[s] for s in own]
        for state in states_of(part.block):
            found += 1
            compared += (1 << state.sinks.bit_count()) - 1
            # The sinks of the states are the sets of independent ops: the stages of `dos`.
            distinct.add(tuple(sorted(of_part[op] for op in members(state.sinks))))
    assert found == states
    assert compared == pytest.approx(transitions, rel=0.01)
    assert len(distinct) <= most * states


def test_stages_of_a_real_network_are_found_and_no_slower():
    block, signatures, kept = parts_of("squeezenet_1_0?batch=1&size=64")
    assert len(kept.parts) == len(cut(block))
    table = Table(block, signatures, [None] * len(block), 0)
    problem = StageProblem(
        block, signatures, table, table, [None] * len(block), 2, [1.0] * len(block)
    )
    found = SCHEDULERS["dos"](problem)
    asked = {key_of(block, stage, signatures) for stage in table.asked}
    assert found.states == sum(
        len(states_of(part.block))
        for part in {_named(p, signatures): p for p in kept.parts}.values()
    )
    assert found.transitions >= sum(1 for _ in endings_of(states_of(kept.parts[1].block)[-1]))
    assert len(asked) <= found.states
    alone = sequential(block, table)
    assert found.seconds <= alone.seconds
    assert ios(kept.parts[1].block, lambda s: [StageTiming(1.0) for _ in s]).stages


def _named(part, signatures):
    return part.block, tuple(signatures[op] for op in part.ops)
