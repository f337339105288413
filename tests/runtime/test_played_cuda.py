"""The CUDA that the CPU plays finds what is not ordered. That it finds each wait that lacks is
shown by executors/test_gpu_races.py."""

import pytest
import torch

from tests.support.played_cuda import PlayedCuda, StreamRaceError


@pytest.fixture
def cuda():
    return PlayedCuda()


def test_a_write_must_wait_for_reads(cuda):
    first, second, event = cuda.Stream(), cuda.Stream(), cuda.Event()
    with cuda.stream(first):
        made = torch.ones(4) * 2
    event.record(first)
    second.wait_event(event)
    with cuda.stream(second):
        made + 1
    with cuda.stream(first), pytest.raises(StreamRaceError, match="writes over"):
        made.add_(1)


def test_an_event_must_be_recorded_before_it_is_awaited(cuda):
    with pytest.raises(StreamRaceError, match="before it is recorded"):
        cuda.Stream().wait_event(cuda.Event())


def test_memory_must_not_be_freed_while_another_stream_reads_it(cuda):
    first, second, event = cuda.Stream(), cuda.Stream(), cuda.Event()
    with cuda.stream(first):
        made = torch.ones(4) * 2
    event.record(first)
    second.wait_event(event)
    with cuda.stream(second):
        copied = made + 1
    del made
    with pytest.raises(StreamRaceError, match="freed"), cuda.stream(first):
        torch.ones(4) + copied.numel()


def test_memory_may_be_freed_behind_a_wait(cuda):
    first, second = cuda.Stream(), cuda.Stream()
    there, back = cuda.Event(), cuda.Event()
    with cuda.stream(first):
        made = torch.ones(4) * 2
    there.record(first)
    second.wait_event(there)
    with cuda.stream(second):
        made + 1
    back.record(second)
    first.wait_event(back)
    del made
    with cuda.stream(first):
        assert (torch.ones(4) + 1).tolist() == [2.0] * 4


def test_the_host_knows_what_it_has_waited_for(cuda):
    first, second = cuda.Stream(), cuda.Stream()
    with cuda.stream(first):
        made = torch.ones(4) * 2
    cuda.synchronize()
    with cuda.stream(second):
        assert (made + 1).tolist() == [3.0] * 4


def test_a_graph_runs_again_on_the_same_memory_and_is_watched(cuda):
    first, second = cuda.Stream(), cuda.Stream()
    value = torch.zeros(4)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph, stream=first):
        value.add_(1)
        doubled = value * 2
    assert value.tolist() == [0.0] * 4
    for step in (1, 2):
        with cuda.stream(first):
            graph.replay()
        assert value.tolist() == [float(step)] * 4
        assert doubled.tolist() == [2.0 * step] * 4
    with cuda.stream(second), pytest.raises(StreamRaceError):
        doubled + 1


def test_a_capture_refuses_to_wait_for_the_host(cuda):
    stream = cuda.Stream()
    with (
        pytest.raises(RuntimeError, match="while it captures"),
        cuda.graph(cuda.CUDAGraph(), stream=stream),
    ):
        cuda.synchronize()


@pytest.mark.parametrize("inference", [False, True])
def test_a_capture_refuses_to_return_a_number(cuda, inference):
    value = torch.tensor(1.0)
    with (
        torch.inference_mode(inference),
        pytest.raises(RuntimeError, match="while it captures"),
        cuda.graph(cuda.CUDAGraph(), stream=cuda.Stream()),
    ):
        value.item()


def test_a_graph_of_forked_streams_keeps_their_order(cuda):
    first, second = cuda.Stream(), cuda.Stream()
    there, back, graph = cuda.Event(), cuda.Event(), cuda.CUDAGraph()
    value = torch.ones(4)
    with cuda.graph(graph, stream=first):
        doubled = value * 2
        there.record(first)
        second.wait_event(there)
        cuda.set_stream(second)
        third = doubled + 1
        back.record(second)
        cuda.set_stream(first)
        first.wait_event(back)
        total = third + doubled
    with cuda.stream(first):
        graph.replay()
        assert total.tolist() == [5.0] * 4
        value.fill_(2)
        graph.replay()
    assert total.tolist() == [9.0] * 4


def test_a_graph_whose_fork_does_not_wait_for_what_it_reads_is_found(cuda):
    first, second = cuda.Stream(), cuda.Stream()
    there, back, graph = cuda.Event(), cuda.Event(), cuda.CUDAGraph()
    with cuda.graph(graph, stream=first):
        there.record(first)
        doubled = torch.ones(4) * 2
        second.wait_event(there)
        cuda.set_stream(second)
        doubled + 1
        back.record(second)
        cuda.set_stream(first)
        first.wait_event(back)
    with cuda.stream(first), pytest.raises(StreamRaceError, match="reads what"):
        graph.replay()


def test_a_capture_must_join_what_it_forks_and_fork_what_it_uses(cuda):
    first, second, there = cuda.Stream(), cuda.Stream(), cuda.Event()
    with (
        pytest.raises(RuntimeError, match="not joined"),
        cuda.graph(cuda.CUDAGraph(), stream=first),
    ):
        there.record(first)
        second.wait_event(there)
        cuda.set_stream(second)
        torch.ones(4) + 1
        cuda.set_stream(first)
    with (
        pytest.raises(StreamRaceError, match="not forked"),
        cuda.graph(cuda.CUDAGraph(), stream=first),
    ):
        cuda.set_stream(second)


def test_a_capture_refuses_to_wait_for_an_event_from_before(cuda):
    first, second, event = cuda.Stream(), cuda.Stream(), cuda.Event()
    event.record(second)
    with (
        pytest.raises(RuntimeError, match="while it captures"),
        cuda.graph(cuda.CUDAGraph(), stream=first),
    ):
        first.wait_event(event)


def test_a_function_is_one_work(cuda):
    first, second = cuda.Stream(), cuda.Stream()
    run = cuda.at_work(lambda value: [value * 2])
    given = torch.ones(4)
    with cuda.stream(first):
        (made,) = run(given)
    with cuda.stream(second), pytest.raises(StreamRaceError, match="reads what compiled code"):
        run(made)
    cuda.synchronize()
    graph = cuda.CUDAGraph()
    with cuda.graph(graph, stream=first):
        (again,) = run(given)
    given.fill_(5)
    with cuda.stream(first):
        graph.replay()
    assert again.tolist() == [10.0] * 4


def test_a_capture_ends_on_the_stream_that_it_began_on(cuda):
    first, second, there, back = cuda.Stream(), cuda.Stream(), cuda.Event(), cuda.Event()
    with (
        pytest.raises(RuntimeError, match="another stream"),
        cuda.graph(cuda.CUDAGraph(), stream=first),
    ):
        there.record(first)
        second.wait_event(there)
        back.record(second)
        first.wait_event(back)
        cuda.set_stream(second)
