"""benchmarks/gpu/run.py: it goes on after a failure, resumes, and writes the page of docs. Of its
parts benchmarks/gpu/largest.py also runs here, on a GPU that the CPU plays."""

import json
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dovetail.costs import analytic_costs
from dovetail.errors import OutOfMemoryError
from dovetail.machine import local_machine
from dovetail.runtime.native import SWITCH
from tests.support.benchmark_scripts import benchmark_scripts
from tests.support.played_gpus import cpu, gpu, linked

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script():
    with benchmark_scripts("gpu", "run") as scripts:
        yield scripts.run


@pytest.fixture
def parts(script, monkeypatch):
    """Three parts that need no GPU: one writes its results, one fails, one takes too long."""
    writes = "import sys; open(sys.argv[1], 'w').write('{}')"
    made = {
        "writes": script.Part("it writes", ("-c", writes, "{out}"), 1),
        "fails": script.Part("it fails", ("-c", "import sys; print('why'); sys.exit(3)"), 1),
        "hangs": script.Part("it hangs", ("-c", "import time; time.sleep(60)"), 1 / 60),
    }
    monkeypatch.setattr(script, "PARTS", made)
    monkeypatch.setattr(script, "card", lambda: {"gpu": "G", "torch": "2", "date": "today"})
    return made


def run_script(script, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["run.py", *map(str, arguments)])
    script.main()


def test_a_part_that_fails_or_hangs_does_not_stop_the_others(script, parts, tmp_path, monkeypatch):
    run_script(script, monkeypatch, "--out", tmp_path, "--minutes", "1")
    status = json.loads((tmp_path / "status.json").read_text())
    ends = {name: part["ended"] for name, part in status["parts"].items()}
    assert ends == {"writes": "done", "fails": "exit status 3", "hangs": "ended after 1 s"}
    assert (tmp_path / "writes.json").read_text() == "{}"
    assert "why" in (tmp_path / "fails.txt").read_text()


def test_what_is_done_is_not_run_again(script, parts, tmp_path, monkeypatch, capsys):
    for _ in range(2):
        run_script(script, monkeypatch, "--out", tmp_path, "--only", "writes")
        (tmp_path / "writes.json").unlink(missing_ok=True)
    assert "writes: done before" in capsys.readouterr().out
    assert not (tmp_path / "writes.json").exists()


def test_without_time_nothing_is_begun(script, parts, tmp_path, monkeypatch, capsys):
    run_script(script, monkeypatch, "--out", tmp_path, "--minutes", "0")
    assert capsys.readouterr().out.count("no time left") == 3


def test_the_page_in_docs_is_that_of_the_results(script):
    assert (ROOT / "docs/gpus.md").read_text() == script.page(ROOT / "benchmarks/gpu/results")


def test_the_page_says_what_ran_and_on_which_card(script, parts, tmp_path, monkeypatch):
    run_script(script, monkeypatch, "--out", tmp_path, "--only", "writes,fails")
    page = script.page(tmp_path)
    assert "G, torch 2, today." in page
    assert "| writes | it writes | done (0 s)" in page
    assert "| fails | it fails | exit status 3 (0 s)" in page
    assert "| hangs | it hangs | not run |" in page


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(script, tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="sees no GPU here"):
        run_script(script, monkeypatch, "--out", tmp_path)


def test_every_part_names_a_script_that_is_there(script):
    for part in script.PARTS.values():
        if part.command[0] != "-m":
            assert (ROOT / part.command[0]).exists()


# --- The part "largest" ---

TINY = {"hidden": 64, "heads": 2, "vocabulary": 128, "context": 8, "batch": 1}
TINY_CAP = 500_000


@pytest.fixture
def largest(monkeypatch, tmp_path):
    """The script, with costs by data sheet: by these the played GPU is the fastest device."""
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(SWITCH, "python")  # a C++ runner would have to be built there first
    monkeypatch.setattr(
        "dovetail.pipeline.searching.costs_of",
        lambda step, machine, *_: analytic_costs(step.graph, machine),
    )
    with benchmark_scripts("gpu", "largest") as scripts:
        yield scripts.largest


def box():
    """This machine's first core and a GPU that the CPU plays."""
    core = replace(cpu(0), model=local_machine().devices[0].model)
    fast = {"float32": 1e12, "float64": 1e12}
    return linked("box", core, replace(gpu(0), flops_per_second=fast))


@pytest.mark.usefixtures("forked_workers", "played_gpus")
def test_a_model_larger_than_the_gpu_is_planned_for_both_and_runs(largest):
    rows = list(largest.rows_of(box(), TINY_CAP, [0.5, 4.0], 2, TINY, "100e"))
    small, large = (row["ways"]["planned"] for row in rows)
    assert [largest.is_right(row) for row in rows] == [True, True]
    assert small["ops"]["gpu0"] > small["ops"]["cpu0"]
    assert large["ops"]["cpu0"] > large["ops"]["gpu0"] > 0
    assert 0.4 * TINY_CAP < large["promised_peak_bytes"]["gpu0"] <= TINY_CAP
    assert rows[1]["weights_bytes"] > 3.5 * TINY_CAP
    for row in rows:
        eager, planned = row["ways"]["eager"], row["ways"]["planned"]
        assert eager["seconds"] > 0 and eager["max_difference"] == 0
        assert planned["seconds"] > 0 and planned["max_difference"] < 1e-5


@pytest.mark.parametrize(
    ("errors", "caps"),
    [
        ([], [1000]),
        # Of a share of .8 the cap is .8 of the last; where that is no guide it is .9 of it.
        ([("gpu0", 1000, 800), ("gpu0", 1000, 990), ("gpu0", 0, 0)], [1000, 800, 720, 648]),
        ([("gpu0", 1000, 800)] * 5, None),
        ([("cpu0", 1000, 800)], None),
    ],
)
def test_a_plan_that_lacks_memory_is_made_again_with_a_lower_cap(
    largest, monkeypatch, errors, caps
):
    left, asked, closed = list(errors), [], []

    class Placed:
        def __init__(self, plan, _step):
            assert plan.caps[0][0] == "gpu0"
            asked.append(plan.caps[0][1])

        def feed(self, inputs):
            pass

        def step_seconds(self, steps):
            if left:
                raise OutOfMemoryError(*left.pop(0))

        def close(self):
            closed.append(self)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.close()

    plan = SimpleNamespace(
        machine=box(), value=1.0, placer="single", orders=((), ()), peak_memory_bytes=(0, 0)
    )
    monkeypatch.setattr(
        largest, "make_plan", lambda *_, caps, **__: SimpleNamespace(**vars(plan), caps=caps)
    )
    monkeypatch.setattr(largest, "planned", lambda _plan, step: step)
    monkeypatch.setattr(largest, "run", Placed)
    case = largest.Case(None, box(), (), 1000)
    if caps is None:
        with pytest.raises(OutOfMemoryError), largest.planned_way(case):
            pass
    else:
        with largest.planned_way(case) as way:
            assert way.facts["caps_bytes"] == asked == caps
    assert len(closed) == len(asked)


@pytest.mark.skipif(torch.cuda.is_available(), reason="accelerate finds a GPU")
def test_without_accelerate_or_its_gpu_the_other_ways_are_measured(largest, monkeypatch):
    monkeypatch.setattr(largest, "WAYS", {"accelerate": largest.accelerate_way})
    case = largest.case_of(largest.network(1e5, TINY), box(), TINY_CAP)
    assert "Error: " in largest.measure(case, 1)["accelerate"]["raised"]
    monkeypatch.setitem(sys.modules, "accelerate", None)
    found = largest.measure(case, 1)["accelerate"]
    assert not found["fits"] and found["raised"].startswith("ModuleNotFoundError: ")


def test_accelerate_offloads_what_is_above_the_cap(largest, monkeypatch):
    """The CPU computes in the GPU's place; what is offloaded to the CPU is so all the same."""
    pytest.importorskip("accelerate")
    monkeypatch.setattr(largest, "GPU", torch.device("cpu"))
    for name in ("reset_peak_memory_stats", "synchronize", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda _device: 0)
    case = largest.case_of(largest.network(2 * TINY_CAP, TINY), box(), TINY_CAP)
    places = largest.auto_map(case.module, TINY_CAP)
    on_gpu = [name for name, place in places.items() if place is largest.GPU]
    assert "embedding" in on_gpu
    # Room for the largest of the layers that are copied there is left.
    layer_bytes = sum(p.nbytes for p in case.module.layers[0].parameters())
    held = sum(p.nbytes for n in on_gpu for p in case.module.get_submodule(n).parameters())
    assert 0 < held <= TINY_CAP - layer_bytes
    with largest.accelerate_way(case) as way:
        assert set(way.facts["modules"]) == {"cpu"} and way.seconds() > 0
        found = way.output()
    with torch.no_grad():
        assert torch.equal(found, case.module(*case.inputs))
    assert way.peak() == {"peak_bytes": 0}


def test_a_way_that_fails_does_not_stop_the_others(largest, monkeypatch):
    closed = []

    @contextmanager
    def way(outputs, steps):
        """Opens unless `outputs` is none, and runs so many steps."""
        left = iter([0.1] * steps)
        try:
            yield largest.Way(lambda: next(left), outputs.clone, {"made": True})
        finally:
            closed.append(steps)

    reference = torch.tensor([1.0, 2.0])
    ways = {
        "first": lambda _case: way(reference, 9),
        "absent": lambda _case: way(None, 9),
        "ends early": lambda _case: way(reference + 1, 2),
        "last": lambda _case: way(reference - 0.5, 9),
    }
    monkeypatch.setattr(largest, "WAYS", ways)
    case = largest.case_of(largest.network(1e5, TINY), box(), TINY_CAP)
    found = largest.measure(case, 3)
    assert [found[name]["fits"] for name in ways] == [True, False, False, True]
    assert found["absent"]["raised"].startswith("AttributeError: ")
    assert found["ends early"]["raised"].startswith("StopIteration: ")
    assert found["last"] == {
        "fits": True, "made": True, "max_difference": 0.5, "max_output": 2.0, "seconds": 0.1,
    }  # fmt: skip
    assert len(closed) == 4


def test_rows_are_written_one_by_one_and_a_wrong_one_is_told(largest, monkeypatch, tmp_path):
    out, written = tmp_path / "largest.json", []

    def measure(case, rounds):
        written.append(len(json.loads(out.read_text())["rows"]) if out.exists() else 0)
        if len(written) == 2:
            raise RuntimeError("no\nmore")
        right = {"fits": True, "max_difference": 1e-6, "max_output": 1.0}
        return {"planned": right | {"rounds": rounds}}

    monkeypatch.setattr(largest, "SIZES", TINY)
    monkeypatch.setattr(largest, "resolve_machine", lambda _text: box())
    monkeypatch.setattr(largest, "measure", measure)
    monkeypatch.setattr(
        sys, "argv", ["largest.py", "--out", str(out), "--gpu-memory", "1MB", "--times", ".5,1,2"]
    )
    with pytest.raises(SystemExit) as ended:
        largest.main()
    assert ended.value.code == 1 and written == [0, 1, 2]
    rows = json.loads(out.read_text())["rows"]
    assert [row["gpu_bytes"] for row in rows] == [10**6] * 3
    assert rows[1]["raised"] == "RuntimeError: no"
    assert rows[2]["ways"]["planned"]["rounds"] == 5
    assert rows[2]["weights_bytes"] == pytest.approx(2e6, rel=0.1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_largest_model_is_not_asked_for(largest, monkeypatch, tmp_path):
    monkeypatch.setattr(largest, "resolve_machine", lambda _text: local_machine("here/cpu"))
    monkeypatch.setattr(sys, "argv", ["largest.py", "--out", str(tmp_path / "largest.json")])
    with pytest.raises(SystemExit, match="sees no GPU here"):
        largest.main()


def test_only_the_first_gpu_is_capped_and_planned_for(largest):
    machine = linked("box", cpu(0), gpu(0), gpu(1))
    found = largest.capped(machine, 1000)
    assert found.device_names == ("cpu0", "gpu0") and len(found.links) == 2
    assert found.devices[1].memory_bytes == 1000
    assert largest.capped(machine, 1 << 40).devices[1] == machine.devices[1]
