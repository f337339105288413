"""Every loader loads what it is given or refuses it by an error of ours, at once, in little memory.

`benchmarks/fuzz` changes valid files and texts at random. What it found is in
`tests/data/regressions`, a file for each failure, and must never fail again.
"""

import json
import random
from pathlib import Path

import pytest

from tests.support.benchmark_scripts import benchmark_scripts

REGRESSIONS = Path(__file__).parent / "data" / "regressions"
PLANTED = Path(__file__).parent / "support" / "planted_loaders.py"
TARGETS = (
    "graph", "graph-gz", "instance", "machine", "plan", "onnx", "policy", "history", "history-gz",
    "history-csv", "trace", "run", "costs", "machine-text", "model-text", "command",
)  # fmt: skip
INPUTS = {"command": 40, "model-text": 40}
MOST_INPUTS = 80
"""So many inputs of a target are loaded here; `benchmarks/fuzz` loads thousands."""


@pytest.fixture(scope="module")
def fuzz():
    with benchmark_scripts("fuzz", "driver", "mutations", "run", "targets", "worker") as scripts:
        yield scripts


def test_every_target_is_fuzzed_here(fuzz):
    assert tuple(fuzz.targets.TARGETS) == TARGETS


@pytest.fixture(scope="module")
def idle():
    """Workers without a target, which have imported what loaders need."""
    workers = []
    yield workers
    for worker in workers:
        worker.close()


@pytest.mark.parametrize("name", TARGETS)
def test_a_loader_takes_or_refuses_whatever_it_is_given(fuzz, name, idle):
    """First all that once failed, then changed inputs, the same ones each time."""
    fuzzer = fuzz.driver.Fuzzer(name, worker=idle.pop() if idle else None)
    ending = fuzz.targets.TARGETS[name].ending
    try:
        failures = {
            path.name: fuzzer.load(path.read_bytes())
            for path in sorted(REGRESSIONS.glob(f"{name}-????????{ending}"))
        }
        failed = {file: f for file, f in failures.items() if f}
        assert failed == {}
        outcome = fuzzer.run(INPUTS.get(name, MOST_INPUTS), keeps=True)
    except BaseException:
        fuzzer.close()
        raise
    if worker := fuzzer.release():
        idle.append(worker)
    assert list(outcome.failures.values()) == []
    assert outcome.counts.loaded >= 1


def test_the_kept_inputs_are_small_and_each_is_of_a_target(fuzz):
    files = [path for path in REGRESSIONS.iterdir() if path.name != "README.md"]
    assert all(path.stat().st_size <= fuzz.driver.MOST_INPUT_BYTES for path in files)
    assert all(path.name.rpartition("-")[0] in TARGETS for path in files)


def planted(fuzz, name, **options):
    return fuzz.driver.Fuzzer(name, targets=PLANTED, **options)


def test_an_untyped_exception_is_found_named_and_minimised(fuzz):
    fuzzer = planted(fuzz, "raising")
    try:
        outcome = fuzzer.run(200)
        counts = outcome.counts
        assert counts.inputs == 200 == counts.loaded + counts.typed + counts.untyped
        assert min(counts.loaded, counts.typed, counts.untyped) > 0
        (failure,) = outcome.failures.values()
        assert (failure.kind, failure.error, failure.frame) == (
            "untyped", "KeyError", "planted_loaders.py:raising",
        )  # fmt: skip
        data = fuzzer.input(failure)
        assert fuzz.driver.minimise(data, lambda d: fuzzer.fails_alike(d, failure)) == b"K"
    finally:
        fuzzer.close()


@pytest.mark.parametrize(
    ("name", "letter", "kind", "error"),
    [("hanging", b"H", "slow", "TimeoutError"), ("dying", b"D", "died", "exit status 3")],
)
def test_an_input_that_takes_its_process_along_is_named_and_the_rest_follow(
    fuzz, name, letter, kind, error
):
    fuzzer = planted(fuzz, name, slow_seconds=0.5)
    try:
        outcome = fuzzer.run(40)
        assert outcome.counts.inputs == 40
        failed = [i for i in range(40) if letter in _input(fuzzer, fuzz, i)]
        assert len(failed) == outcome.counts.failed > 0
        (failure,) = outcome.failures.values()
        assert (failure.index, failure.kind, failure.error) == (failed[0], kind, error)
    finally:
        fuzzer.close()


def _input(fuzzer, fuzz, index):
    return fuzzer.input(fuzz.worker.Failure(fuzzer.name, index, ""))


def test_failures_before_one_that_takes_the_process_along_are_kept(fuzz):
    outcome = planted(fuzz, "both", slow_seconds=0.5).run(60)
    kinds = [failure.kind for failure in outcome.failures.values()]
    assert sorted(kinds) == ["died", "untyped"]
    assert sum(outcome.occurrences.values()) == outcome.counts.failed


def test_an_input_that_grows_its_process_is_found_and_a_slow_leak_is_measured(fuzz):
    outcome = planted(fuzz, "growing", growth_bytes=2**26).run(100)
    assert [failure.kind for failure in outcome.failures.values()] == ["growth"]
    outcome = planted(fuzz, "leaking").run(400)
    assert outcome.counts.failed == 0
    assert outcome.counts.kept_bytes > 150 * 2**17


def test_an_error_without_a_text_is_no_refusal(fuzz):
    outcome = planted(fuzz, "silent").run(100)
    assert outcome.counts.untyped > 0 == outcome.counts.typed - outcome.counts.untyped


def test_an_input_depends_on_the_seed_and_its_number_alone(fuzz):
    target = fuzz.targets.TARGETS["trace"]
    seeds = target.seeds()
    numbers = list(range(50))
    inputs = [target.input(7, i, seeds) for i in numbers]
    random.Random(0).shuffle(numbers)
    assert all(target.input(7, i, seeds) == inputs[i] for i in numbers)
    assert inputs[: len(seeds)] == seeds
    assert len(set(inputs)) > 40
    assert [target.input(8, i, seeds) for i in range(50)] != inputs


def test_json_is_minimised_along_its_tree(fuzz):
    tree = {"a": [1, {"b": "text" * 50, "c": [[]]}], "d": {"bad": 13, "more": [2, 3]}}

    def fails(data):
        try:
            return json.loads(data)["d"]["bad"] == 13
        except (ValueError, KeyError, TypeError):
            return False

    found = fuzz.driver.minimise(json.dumps(tree).encode(), fails)
    assert json.loads(found) == {"d": {"bad": 13}}


def test_deep_and_long_parts_of_a_tree_are_written_out(fuzz):
    hole = fuzz.mutations._HOLE % ("list", 5000)
    data = fuzz.mutations.to_json({"a": hole})
    assert data.count(b"[") == data.count(b"]") == 5000
    assert fuzz.mutations.to_toml({"a": [1.5, {"b c": True}]}) == b'a = [1.5, {"b c" = true}]\n'
