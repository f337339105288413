"""Workers: tasks in their order, one core each, and what happens when one fails or dies."""

import os
import time

import pytest

from reproductions.tasks import BenchTask, work_off

pytestmark = pytest.mark.usefixtures("forks")


def task(name, function, *arguments, after=(), alone=False):
    return BenchTask(
        name, f"tests.support.tiny_tasks:{function}", arguments or (name,), after, alone
    )


def run(tasks, jobs=1):
    """(task -> failure, what was told, what was complained of)"""
    told, complaints = [], []
    failures = work_off(tasks, jobs, lambda *said: told.append(said), complaints.append)
    return failures, told, complaints


@pytest.mark.parametrize("jobs", [0, 1])
def test_tasks_run_after_those_that_they_wait_for(jobs):
    tasks = [
        task("c", "says", after=("a", "b")),
        task("b", "says", after=("a",)),
        task("a", "says"),
    ]
    failures, told, complaints = run(tasks, jobs)
    assert not failures
    assert [name for name, said in told if said == "done"] == ["a", "b", "c"]
    assert ("b", "saying b") in told
    assert complaints == ["heard a", "heard b", "heard c"]


@pytest.mark.parametrize("jobs", [0, 1])
def test_a_task_that_fails_takes_along_what_waits_for_it_and_nothing_else(jobs):
    tasks = [
        task("bad", "raises", "no good"),
        task("later", "says", after=("bad",)),
        task("last", "says", after=("later",)),
        task("other", "says"),
    ]
    failures, told, _ = run(tasks, jobs)
    assert set(failures) == {"bad", "later", "last"}
    assert "ValueError: no good" in failures["bad"]
    assert "tiny_tasks.py" in failures["bad"]
    assert failures["later"] == "later: not run, since bad failed"
    assert [name for name, said in told if said.startswith("saying")] == ["other"]


def test_a_worker_that_dies_is_replaced():
    failures, told, _ = run([task("dying", "dies"), task("next", "says")])
    assert list(failures) == ["dying"]
    assert "killed by SIGKILL" in failures["dying"]
    assert ("next", "done") in told


def test_workers_have_one_thread_and_as_many_cores_as_there_are_for_each(tmp_path):
    path = tmp_path / "seen"
    failures, _, _ = run([task(str(i), "threads", str(path)) for i in range(3)])
    assert not failures
    lines = [line.split() for line in path.read_text().splitlines()]
    assert {(threads, cores) for threads, cores, _ in lines} == {("1", "1")}
    assert len({process for _, _, process in lines}) == 1, "one worker served all of them"


def test_what_needs_much_memory_leaves_its_worker_behind(tmp_path):
    path = tmp_path / "seen"
    failures, _, _ = run([task(str(i), "threads", str(path), alone=True) for i in range(2)])
    assert not failures
    processes = {line.split()[2] for line in path.read_text().splitlines()}
    assert len(processes) == 2


def test_an_interrupt_ends_the_workers(tmp_path):
    path = tmp_path / "seen"

    def tell(name, said):
        if said == "done":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work_off([task("a", "threads", str(path))], 1, tell, print)
    process = int(path.read_text().split()[2])
    while os.path.exists(f"/proc/{process}"):  # for ever: pytest has a limit of its own
        time.sleep(0.01)
