"""Published instances on the command line: planned, saved, opened again, exported, refused."""

import gzip
import json

import pytest

from dovetail.instances import load_instance
from dovetail.placers import PLACERS
from tests.pipeline.test_cli import KEYS, TWO_GPUS
from tests.support.instance_files import INSTANCES, edge, file_of, node

BERT = INSTANCES / "throughput" / "bert24_inference.json"
FAST = ("--placer", "balanced", "--budget", "50e")


@pytest.fixture
def small(tmp_path):
    """A file of four nodes, two accelerators and a CPU."""
    nodes = [node(i, cpu=10.0 * i, acc=1.0 * i, size=40.0, name=f"n{i}") for i in range(1, 5)]
    file = file_of(nodes, [edge(1, 2, 0.5), edge(2, 3, 0.5), edge(3, 4, 0.5)])
    (tmp_path / "small.json").write_text(json.dumps(file))
    return tmp_path / "small.json"


def test_an_instance_is_planned_for_load_in_its_own_milliseconds(dovetail):
    status, out, err = dovetail("plan", BERT, *FAST, "--json")
    assert status == 0, err
    printed = json.loads(out)
    assert set(printed) == KEYS
    assert (printed["unit"], printed["objective"], printed["groups"]) == ("ms", "load", 32)
    assert printed["machine"] == "bert24_inference"
    assert printed["devices"] == [*(f"acc{i}" for i in range(6)), "cpu0", "host"]
    assert printed["baselines"]["single"] == pytest.approx(92.406)
    assert 15 < printed["lower_bound"] <= printed["value"] < 30
    assert all(seconds >= 0 for seconds in printed["found_seconds"].values())


@pytest.mark.parametrize(
    ("options", "value"),
    [
        # Memory holds two: 1 and 4 against 2 and 3, each 5 + .5 in + .5 out.
        (("--objective", "load"), 6.0),
        # Whole stages: 3 + 4 + .5 in.
        (("--objective", "load", "--contiguous"), 7.5),
        # In a chain nothing overlaps: 10 + .5 out and .5 in.
        (("--objective", "latency"), 11.0),
        (("--objective", "step"), 11.0),
    ],
)
def test_every_objective_of_an_instance(dovetail, small, options, value):
    status, out, err = dovetail("plan", small, "--budget", "2000e", "--json", *options)
    assert status == 0, err
    printed = json.loads(out)
    assert printed["value"] == pytest.approx(value)
    assert printed["contiguous"] == ("--contiguous" in options)


@pytest.mark.parametrize("objective", ["load", "latency", "step"])
def test_a_saved_plan_of_an_instance_opens_with_its_own_costs(dovetail, small, tmp_path, objective):
    plan, trace = tmp_path / "plan.json", tmp_path / "trace.json"
    status, out, err = dovetail(
        "plan", small, "--budget", "200e", "--objective", objective, "--out", plan
    )
    assert status == 0, err
    assert " ms" in out
    page = tmp_path / "plan.html"
    status, _, err = dovetail("report", plan, "--out", page, "--trace", trace)
    assert status == 0, err
    assert " ms" in page.read_text()
    assert json.loads(trace.read_text())["traceEvents"]
    saved = json.loads(plan.read_text())
    assert saved["costs"]["source"] == "given"
    assert max(saved["costs"]["sent_bytes"]) > 0
    saved["value"] *= 0.9
    plan.write_text(json.dumps(saved))
    status, _, err = dovetail("report", plan)
    assert status == 2
    assert "promises" in err


def test_a_bound_that_a_search_proved_is_held_against_the_value_alone(dovetail, small, tmp_path):
    plan = tmp_path / "plan.json"
    dovetail("plan", small, "--budget", "200e", "--out", plan)
    saved = json.loads(plan.read_text())
    for bound, proof, complaint in (
        (saved["value"], "CP-SAT", ""),
        (saved["value"], "load balance (LP)", "lower bound"),
        (saved["value"] * 1.01, "CP-SAT", "lower bound"),
    ):
        plan.write_text(json.dumps({**saved, "lower_bound": bound, "bound_proof": proof}))
        status, _, err = dovetail("report", plan)
        assert status == (2 if complaint else 0)
        assert complaint in err


def test_a_packed_instance_is_told_from_a_saved_graph_by_what_it_holds(dovetail, small):
    packed = small.with_suffix(".json.gz")
    packed.write_bytes(gzip.compress(small.read_bytes()))
    status, out, err = dovetail("plan", packed, *FAST, "--json")
    assert status == 0, err
    assert json.loads(out)["ops"] == 8


def test_pins_and_caps_name_the_instances_devices(dovetail, small):
    # 4 is pinned to the CPU; acc1 holds none, acc0 two of the others, and so 1 is there too.
    status, out, err = dovetail(
        "plan", small, "--budget", "200e", "--json", "--pin", "n4=cpu0", "--cap", "acc1=10"
    )
    assert status == 0, err
    assert json.loads(out)["value"] == pytest.approx(50.0)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--machine", "here"), "brings its own machine"),
        (("--machine", "2 x k80"), "brings its own machine"),
        (("--train", "adam"), "leave --train out"),
        (("--pin", "n1=gpu0"), "no device named 'gpu0'; the machine has acc0"),
        (("--cap", "gpu0=1"), "no device named 'gpu0'"),
        (("--objective", "latency", "--contiguous"), "objective load"),
        (("--objective", "step", "--contiguous"), "objective load"),
        (("--objective", "joy"), "joy"),
    ],
)
def test_what_an_instance_cannot_do_exits_with_2_and_says_why(dovetail, small, options, complaint):
    status, out, err = dovetail("plan", small, *options)
    assert status == 2
    assert complaint in err
    assert out == ""


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--objective", "latency"), "published instances alone"),
        (("--contiguous",), "objective load"),
    ],
)
def test_what_a_network_cannot_do_is_refused_before_it_is_captured(dovetail, options, complaint):
    status, _, err = dovetail("plan", "no.such.module:build", *TWO_GPUS, *options)
    assert status == 2
    assert complaint in err


def test_an_instance_is_neither_captured_nor_run(dovetail, small, tmp_path):
    plan = tmp_path / "plan.json"
    status, _, err = dovetail("capture", small, "--out", tmp_path / "g.json")
    assert status == 2
    assert "is an instance" in err
    dovetail("plan", small, *FAST, "--out", plan)
    status, _, err = dovetail("run", plan)
    assert status == 2
    assert "instance has nothing to run" in err


def test_an_instance_that_does_not_fit_prints_every_stable_key(dovetail, tmp_path):
    path = tmp_path / "tight.json"
    nodes = [node(1, size=200.0)]
    path.write_text(json.dumps(file_of(nodes, [], cpus=0)))
    status, out, _ = dovetail("plan", path, "--budget", "50e", "--json")
    assert status == 3
    printed = json.loads(out)
    assert set(printed) >= KEYS
    assert (printed["machine"], printed["unit"]) == ("tight", "ms")
    assert (printed["objective"], printed["value"]) == ("load", None)


@pytest.mark.parametrize("text", ["{}", '{"nodes": [], "edges": []}', '{"nodes": 3, "edges": []}'])
def test_a_malformed_instance_exits_with_2_and_its_name(dovetail, tmp_path, text):
    (tmp_path / "i.json").write_text(text)
    status, _, err = dovetail("plan", tmp_path / "i.json")
    assert status == 2
    assert "i.json" in err


def test_a_plan_is_exported_as_an_instance_that_is_the_same(dovetail, small, tmp_path):
    plan, again = tmp_path / "plan.json", tmp_path / "again.json"
    dovetail("plan", small, *FAST, "--out", plan)
    status, _, err = dovetail("export", plan, "--to", "instance", "--out", again)
    assert status == 0, err
    mine, theirs = load_instance(small), load_instance(again)
    assert (mine.costs.compute_seconds == theirs.costs.compute_seconds).all()
    assert mine.costs.sent_bytes == pytest.approx(theirs.costs.sent_bytes)


def test_a_plan_of_a_network_is_exported_in_every_format(dovetail, tmp_path):
    plan = tmp_path / "plan.json"
    dovetail(
        "plan",
        "tests.support.small_models:branches",
        *TWO_GPUS,
        "--placer",
        "single",
        "--out",
        plan,
    )
    for to, check in {
        "device-map": lambda found: set(found["device_map"]) == {""},
        "split-points": lambda found: found == {},
        "model-explorer": lambda found: "seconds.json" in found,
        "trace": lambda found: len(found["traceEvents"]) > 5,
        "instance": lambda found: found["maxFPGAs"] == 2,
    }.items():
        status, out, err = dovetail(
            "export", plan, "tests.support.small_models:branches", "--to", to
        )
        assert status == 0, err
        assert check(json.loads(out)), to


def test_wrong_exports_exit_with_2_before_the_network_is_captured(dovetail, tmp_path):
    plan = tmp_path / "plan.json"
    dovetail(
        "plan",
        "tests.support.small_models:branches",
        *TWO_GPUS,
        "--placer",
        "single",
        "--out",
        plan,
    )
    status, _, err = dovetail("export", plan, "no.such:module", "--to", "onnx")
    assert status == 2
    assert "device-map, split-points, torchtitan, megatron, vllm, torch-schedule, model-" in err
    status, _, err = dovetail("export", plan, "no.such:module", "--out", "/nowhere/x.json")
    assert status == 2
    assert "/nowhere/x.json" in err


def test_the_help_and_the_error_for_an_unknown_name_list_every_placer(dovetail):
    status, out, _ = dovetail("plan", "--help")
    assert status == 0
    assert all(f"{name}:" in out for name in PLACERS)
    status, _, err = dovetail("plan", BERT, "--placer", "magic")
    assert status == 2
    assert all(name in err for name in PLACERS)


def test_the_tables_of_an_instance_show_loads_and_no_limits_that_are_none(dovetail, small):
    status, out, err = dovetail("plan", small, "--budget", "2000e")
    assert status == 0, err
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    busiest = max(float(rows[name][2]) for name in ("acc0", "acc1", "cpu0"))
    assert busiest == pytest.approx(6.0)
    assert rows["cpu0"][-1] == "unlimited"
    assert "host" not in rows  # it runs nothing and holds nothing
    assert "GiB" not in out


def test_a_step_of_an_instance_has_no_loads(dovetail, small):
    status, out, _ = dovetail("plan", small, *FAST, "--objective", "step")
    assert status == 0
    assert " load " not in out


def test_the_page_of_an_instance_shows_its_loads_and_no_rates_that_mean_nothing(
    dovetail, small, tmp_path
):
    page = tmp_path / "page.html"
    status, _, err = dovetail("plan", small, *FAST, "--report", page)
    assert status == 0, err
    text = page.read_text()
    for nonsense in ("FLOP/s", "GB/s", "2147483648", "dovetail run", "e+"):
        assert nonsense not in text.partition("<script")[0], nonsense
    assert "<th scope=col>load</th>" in text
    assert "unlimited" in text


@pytest.mark.parametrize(
    "command",
    [
        ("plan", "small.json", "--out", "small.json"),
        ("plan", "small.json", "--report", "small.json"),
        ("plan", "small.json", "--out", "x", "--report", "../{}/x"),
        ("report", "plan.json", "--out", "plan.json"),
        ("report", "plan.json", "small.json", "--trace", "small.json"),
        ("report", "plan.json", "--out", "plan.html", "--trace", "plan.html"),
        ("export", "plan.json", "--to", "trace", "--out", "plan.json"),
        ("run", "plan.json", "--report", "plan.json"),
    ],
)
def test_no_output_overwrites_an_input_or_another_output(
    dovetail, small, tmp_path, monkeypatch, command
):
    monkeypatch.chdir(tmp_path)
    dovetail("plan", small, *FAST, "--out", "plan.json")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    status, out, err = dovetail(*(part.format(tmp_path.name) for part in command))
    assert status == 2
    assert "cannot write" in err
    assert out == ""
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_two_outputs_may_go_to_one_place_that_keeps_nothing(dovetail, small):
    status, _, err = dovetail("plan", small, *FAST, "--out", "/dev/null", "--report", "/dev/null")
    assert status == 0, err


@pytest.mark.parametrize("text", ["[1, 2]", '"x"', '{"hello": 1}', "null", "3"])
def test_other_json_is_said_to_be_neither_graph_nor_instance(dovetail, tmp_path, text):
    (tmp_path / "other.json").write_text(text)
    status, _, err = dovetail("plan", tmp_path / "other.json")
    assert status == 2
    assert "neither a saved graph nor a placement instance" in err


def test_a_plan_is_no_model(dovetail, small, tmp_path):
    dovetail("plan", small, *FAST, "--out", tmp_path / "plan.json")
    status, _, err = dovetail("plan", tmp_path / "plan.json")
    assert status == 2
    assert "it is a plan" in err


@pytest.mark.parametrize("change", ["latency", "cost"])
def test_a_plan_does_not_open_against_an_instance_with_other_costs(
    dovetail, small, tmp_path, change
):
    plan = tmp_path / "plan.json"
    dovetail("plan", small, *FAST, "--out", plan)
    file = json.loads(small.read_text())
    if change == "latency":
        file["nodes"][3]["cpuLatency"] = 41.0
    else:
        file["edges"][1]["cost"] = 0.7
    small.write_text(json.dumps(file))
    status, _, err = dovetail("report", plan, small)
    assert status == 2
    assert {"latency": "seconds of op 'n4' on cpu0 0.04", "cost": "sent of op 'n2'"}[change] in err


@pytest.mark.parametrize(
    ("pins", "complaint"),
    [
        ([["n1", "cpu0"]], "which its pins"),
        ([["n9", "cpu0"]], "pin 'n9' matches no op"),
        ([["n1", "acc9"]], "no device named 'acc9'"),
    ],
)
def test_a_plan_that_breaks_its_own_pins_is_refused(dovetail, small, tmp_path, pins, complaint):
    plan = tmp_path / "plan.json"
    dovetail("plan", small, *FAST, "--pin", "n1=acc0", "--out", plan)
    assert dovetail("report", plan)[0] == 0
    plan.write_text(json.dumps({**json.loads(plan.read_text()), "pins": pins}))
    status, _, err = dovetail("report", plan)
    assert status == 2
    assert complaint in err


def test_a_plan_of_a_device_that_is_not_there_is_refused(dovetail, small, tmp_path):
    plan = tmp_path / "plan.json"
    dovetail("plan", small, *FAST, "--out", plan)
    saved = json.loads(plan.read_text())
    saved["placement"][0] = 99  # of a node's size, which is read where the node is
    plan.write_text(json.dumps(saved))
    status, _, err = dovetail("report", plan)
    assert status == 2
    assert "a device that is not there" in err
