import random

import pytest

from dovetail.graph.kernels import FOLDED, fuse, single
from dovetail.pipeline import resolve_model
from dovetail.schedulers.blocks import cut
from dovetail.schedulers.dos import dos
from dovetail.schedulers.ios import ios
from dovetail.schedulers.records import KernelBlock, StageTiming
from dovetail.schedulers.timing import OnceTimer, block_of, key_of, signatures_of

#   0   1
#   |   |
#   2   3     4
TWINS = KernelBlock((0, 0, 0b1, 0b10, 0))


def test_equal_chains_make_equal_stages():
    signatures = ["conv", "conv", "pool", "pool", "pool"]
    key = lambda stage: key_of(TWINS, stage, signatures)  # noqa: E731
    assert key(0b00101) == key(0b01010)
    assert key(0b00100) == key(0b10000)
    assert key(0b00110) == key(0b01001)
    assert key(0b00101) != key(0b00110)  # one group in order, two groups at once


def test_a_distinct_stage_is_timed_once_over_all_blocks():
    asked = []

    def timer(stages):
        asked.extend(stages)
        return [StageTiming(float(stage.bit_count())) for stage in stages]

    once = OnceTimer()
    for _ in range(3):
        found = dos(TWINS, once.of(TWINS, ["conv", "conv", "pool", "pool", "pool"], timer))
        assert found.seconds == 5.0
    assert len(asked) == len(set(asked)) == once.timed < found.states
    assert once.asked == 3 * found.states


SMALL = ("squeezenet_1_0?batch=1&size=64", "inception_v3?batch=1&size=80")


@pytest.fixture(scope="module", params=SMALL)
def graph(request):
    return resolve_model(f"zoo:{request.param}", "").graph


def test_fused_kernels_are_those_that_the_papers_count(graph):
    fused = fuse(graph)
    kinds = {}
    for op, kernel in enumerate(fused.of_op.tolist()):
        if kernel != FOLDED:
            kinds.setdefault(kernel, []).append(graph.kinds[op].removeprefix("aten."))
    heads = [of_kernel[0] for of_kernel in kinds.values()]
    convolutions = heads.count("convolution")
    assert (fused.count, convolutions) in {(38, 26), (124, 94)}
    for of_kernel in kinds.values():
        if of_kernel[0] == "convolution":
            assert of_kernel[-1] == "relu"
    assert single(graph).count > 1.5 * fused.count


def test_kernels_keep_the_order_and_every_op(graph):
    for kernels in (fuse(graph), single(graph)):
        block_of(graph, kernels)  # raises where an edge goes back
        for op, kernel in enumerate(kernels.of_op.tolist()):
            assert (kernel == FOLDED) or not graph.is_source[op]
        assert set(kernels.of_op.tolist()) - {FOLDED} == set(range(kernels.count))


def test_stages_of_real_networks_repeat(graph):
    kernels = fuse(graph)
    block, signatures = block_of(graph, kernels), signatures_of(graph, kernels)
    rng, once = random.Random(0), OnceTimer()
    states = 0
    for part in cut(block):
        own = [signatures[op] for op in part.ops]
        timer = once.of(part.block, own, lambda stages: [StageTiming(rng.random()) for _ in stages])
        found = dos(part.block, timer)
        states += found.states
        assert ios(part.block, timer).seconds <= found.seconds + 1e-12
    assert once.timed < once.asked
    assert states in {46, 1351}


def test_equal_ops_of_two_inputs_are_not_timed_as_merged():
    once, signatures = OnceTimer(), ["conv"] * 4
    block = KernelBlock((0,) * 4)
    timer = once.of(
        block,
        signatures,
        lambda stages: [StageTiming(1.0, merged=stage == 0b0011) for stage in stages],
        merge_keys=["a", "a", "a", "b"],
    )
    found = timer([0b0011, 0b1001, 0b0110, 0b1010])
    assert [timing.merged for timing in found] == [True, False, True, False]
    assert once.timed == 2
