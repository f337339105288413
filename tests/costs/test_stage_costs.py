import random
from dataclasses import replace

import pytest

from dovetail.costs.stages import (
    FITTED,
    AnalyticStages,
    CpuRates,
    GpuRates,
    Launch,
    StageWork,
    fitted_parameters,
    kernel_works,
    merged_launch,
    stage_rates,
)
from dovetail.errors import MachineError
from dovetail.graph.kernels import fuse
from dovetail.machine import PRESETS, Device
from dovetail.pipeline import resolve_model
from tests.support.builders import Op, graph_of, source

JOIN, LAUNCH = 0.5, 0.25
PLAIN = GpuRates(1000.0, 100.0, full_elements=100.0, launch_seconds=0.0, join_seconds=0.0)
GPU = replace(PLAIN, launch_seconds=LAUNCH, join_seconds=JOIN)


def work(flops, moved_bytes=0.0, elements=100.0):
    return StageWork((Launch(flops, moved_bytes, elements),))


def costs(*works, rates=PLAIN):
    return AnalyticStages(works, rates)


def test_a_launch_takes_its_start_and_the_longer_of_arithmetic_and_memory():
    of = costs(work(2000.0, 100.0), work(1000.0, 300.0), work(1000.0, elements=25.0), rates=GPU)
    assert of.seconds([[0]]) == LAUNCH + 2.0
    assert of.seconds([[1]]) == LAUNCH + 3.0
    assert of.seconds([[2]]) == LAUNCH + 4.0  # a quarter of the device
    assert of.seconds([[0, 1, 2]]) == 3 * LAUNCH + 9.0


def test_launches_that_fill_half_the_device_overlap():
    of = costs(*[work(1000.0, elements=50.0)] * 3)
    assert of.seconds([[0], [1]]) == of.seconds([[0]]) == 2.0
    assert of.seconds([[0], [1], [2]]) == pytest.approx(3.0)


def test_launches_that_fill_the_device_do_not_overlap():
    of = costs(*[work(1000.0)] * 2, *[work(0.0, 300.0, elements=1.0)] * 2)
    assert of.seconds([[0], [1]]) == pytest.approx(2.0)
    assert of.seconds([[2], [3]]) == pytest.approx(6.0)  # by memory


def test_groups_keep_step_while_they_share():
    #  A (1/2 of the device) ##########            while two want 5/4 of it, both take 5/4 as long:
    #  B (3/4) #####, C (1/4)      #####           2 x 5/4, then A and C beside each other, 2
    of = costs(work(2000.0, elements=50.0), work(1500.0, elements=75.0), work(500.0, elements=25.0))
    assert [of.seconds([[k]]) for k in range(3)] == [4.0, 2.0, 2.0]
    assert of.seconds([[0], [1, 2]]) == pytest.approx(4.5)


def random_works(rng, count):
    sizes = [(rng.uniform(0, 500), rng.uniform(0, 50), rng.uniform(1, 300)) for _ in range(count)]
    return [work(*size) for size in sizes]


@pytest.mark.parametrize("seed", range(30))
def test_a_stage_is_no_faster_than_its_longest_group_and_no_slower_than_all_in_a_row(seed):
    rng = random.Random(seed)
    of = costs(*random_works(rng, 8), rates=GPU)
    kernels = rng.sample(range(8), 8)
    groups = [kernels[:3], kernels[3:5], kernels[5:6], kernels[6:]]
    alone = [of.seconds([group]) for group in groups]
    seconds = of.seconds(groups)
    assert max(alone) + JOIN <= seconds + 1e-9
    assert seconds <= sum(alone) + JOIN + 1e-9
    assert seconds == pytest.approx(of.seconds(groups[::-1]))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("rates", [GPU, CpuRates(1000.0, 100.0, lanes=4, lane_elements=20.0)])
def test_more_work_never_takes_less(seed, rates):
    rng = random.Random(seed)
    works = random_works(rng, 4)
    groups = [[0, 1], [2], [3]]
    before = costs(*works, rates=rates).seconds(groups)
    (old,) = works[1].launches
    for more in (replace(old, flops=2 * old.flops), replace(old, moved_bytes=3 * old.moved_bytes)):
        works[1] = StageWork((more,))
        assert costs(*works, rates=rates).seconds(groups) >= before - 1e-9


def test_a_merge_pads_to_the_largest_window_and_reads_the_input_once():
    small = StageWork((Launch(100.0, 60.0, 20.0),), (1, 1), image_bytes=40.0, weight_bytes=2.0)
    large = StageWork((Launch(900.0, 80.0, 20.0),), (3, 3), image_bytes=40.0, weight_bytes=18.0)
    merged = merged_launch([small, large])
    assert merged == Launch(900.0 + 900.0, 60.0 + 80.0 - 40.0 + 16.0, 40.0)
    of = costs(small, large, rates=GPU)
    assert of.seconds([[0], [1]], merged=True) == LAUNCH + 1.8 / 0.4
    assert merged_launch([large]) == large.launches[0]
    with pytest.raises(ValueError, match="same input"):
        merged_launch([small, replace(large, image_bytes=41.0)])
    with pytest.raises(ValueError, match="one convolution"):
        costs(small, work(1.0)).seconds([[0], [1]], merged=True)


def test_a_cpu_gives_one_op_all_cores_and_groups_one_each():
    rates = CpuRates(
        1000.0, 1e9, 4, efficiency=0.5, lane_elements=10.0, launch_seconds=0.0, join_seconds=JOIN
    )
    of = costs(
        work(1000.0), work(1000.0), work(1000.0, elements=5.0), *[work(1000.0)] * 6, rates=rates
    )
    assert of.seconds([[0]]) == 2.0  # 4 cores at half of their speed
    assert of.seconds([[2]]) == 4.0  # too small to be split
    assert of.seconds([[0], [1]]) == JOIN + 4.0
    assert of.seconds([[k] for k in range(8)]) == pytest.approx(JOIN + 8.0)  # two to a core


def test_rates_of_a_device_come_from_its_sheet_and_the_fit():
    fitted = fitted_parameters()
    small, large = (stage_rates(PRESETS[model].device) for model in ("v100", "h200"))
    assert small.flops_per_second == fitted["peak_share"] * 15.7e12
    assert large.full_elements / small.full_elements == pytest.approx(132 / 80)
    cpu = stage_rates(PRESETS["haswell"].device, lanes=18)
    assert (cpu.lanes, cpu.launch_seconds) == (18, 1e-6)
    assert stage_rates(replace(PRESETS["haswell"].device, cores=(0, 1))).lanes == 2


def test_what_is_not_known_of_a_device_is_named():
    unknown = Device("d", "gpu", "abacus", 1, {"float32": 1e12}, 1e9, 1e-6)
    with pytest.raises(MachineError, match="threads a abacus"):
        stage_rates(unknown)
    assert stage_rates(unknown, lanes=1000).full_elements > 0
    with pytest.raises(MachineError, match="cores a haswell"):
        stage_rates(PRESETS["haswell"].device)
    # What has no rate of its own counts as float32.
    assert stage_rates(unknown, lanes=1000, dtype="int4") == stage_rates(unknown, lanes=1000)


def test_the_fit_gives_shares_and_small_seconds():
    found = fitted_parameters()
    assert set(found) == {"peak_share", "full_share", "launch_seconds", "join_seconds"}
    assert 0 < found["peak_share"] <= 1
    assert 0 < found["launch_seconds"] < 1e-4 > found["join_seconds"] >= 0
    assert FITTED.exists()


def test_what_stays_within_a_launch_is_no_traffic_and_folded_work_is_free():
    graph = graph_of(
        source("x", "input", 400),
        source("w", output_bytes=40),
        source("v", output_bytes=20),
        Op("w2", ("w",), output_bytes=40, flops=9999),
        Op("sum", ("x", "v"), "aten.add", output_bytes=400, flops=100),
        Op("mm", ("sum", "w2"), "aten.mm", output_bytes=800, flops=5000),
        Op("relu", ("mm",), "aten.relu", output_bytes=800, flops=200),
        outputs=("relu",),
    )
    (found,) = kernel_works(graph, fuse(graph))
    assert found.launches == (
        Launch(100.0, 400 + 20 + 400, 100.0),
        Launch(5200.0, 400 + 40 + 800, 200.0),
    )
    assert (found.flops, found.moved_bytes) == (5300.0, 2060.0)
    assert found.window == ()


def test_works_of_a_network_are_those_that_the_graph_counts():
    graph = resolve_model("zoo:squeezenet_1_0?batch=1&size=64", "").graph
    kernels = fuse(graph)
    works = kernel_works(graph, kernels)
    assert sum(found.flops for found in works) == graph.flops.sum()
    assert sum(found.moved_bytes for found in works) < graph.accessed_bytes.sum()
    windows = [found.window for found in works if found.window]
    assert (len(windows), windows.count((3, 3)), windows.count((7, 7))) == (26, 8, 1)
    assert all(len(found.launches) == 1 for found in works)
