"""DOS's tables: their rows, what is kept, and what is shown beside the papers' figures."""

import csv
import json
from dataclasses import replace

import pytest
import torch

from dovetail.errors import MachineError, UsageError
from dovetail.executors.stages import cuda, measuring, preparing, targets
from dovetail.networks import NETWORKS as ZOO
from dovetail.runtime import timers
from reproductions import dos
from reproductions.dos import (
    NETWORKS,
    PUBLISHED_DOS,
    PUBLISHED_IOS,
    PUBLISHED_TABLE1,
    PUBLISHED_TABLE2,
    PUBLISHED_WORK,
    DosNetwork,
    DosSettings,
    run_rows,
)
from reproductions.dos_page import render, tables_of
from reproductions.elsewhere import ComparisonRequest
from reproductions.results import ResultTable
from tests.support.benchmark_scripts import BENCHMARKS, benchmark_scripts
from tests.support.fake_cuda import FakeCuda

TINY = DosNetwork("SqueezeNet", "zoo:squeezenet_1_0?size=40&width=.1&classes=4")
PRESETS = {"devices": ("v100",), "batches": (1, 8), "sampled": 0}


@pytest.fixture
def tiny(monkeypatch):
    """There are two networks, both of them one small one, and all is measured but briefly."""
    monkeypatch.setattr(dos, "NETWORKS", dict.fromkeys(("squeezenet", "inception-v3"), TINY))
    monkeypatch.setattr(dos, "SPECIALISED", ("squeezenet",))
    for name, least in (("_SAMPLE_SECONDS", 1e-5), ("_VISITS", 1), ("_MOST_PASSES", 5)):
        monkeypatch.setattr(measuring, name, least)
    monkeypatch.setattr(timers, "ROUND_SECONDS", 1e-5)


def tables(lines):
    return {table.key: table for table in tables_of(lines)}


def save_csv(lines, path):
    path.write_bytes(ResultTable.of_records(dos.FIELDS, lines).csv_text())


def test_every_network_has_its_published_figures_and_is_of_the_zoo():
    for published in (PUBLISHED_DOS, PUBLISHED_IOS, PUBLISHED_WORK):
        assert published.keys() == NETWORKS.keys()
    for network in NETWORKS.values():
        assert network.model.removeprefix("zoo:").partition("?")[0] in ZOO
        assert network.sized(None) == network.model
        assert "size=64" in network.sized(64) and network.sized(64).count("?") == 1
    # The specialised schedule is the fastest of each published row.
    for published in (PUBLISHED_TABLE1, PUBLISHED_TABLE2):
        for own, row in published.items():
            assert min(row, key=row.get) == own and row.keys() == published.keys()
    for network, figures in PUBLISHED_IOS.items():
        assert figures["ios"] == min(figures.values()), network


def test_rows_are_asked_for_as_the_tables_need(tmp_path):
    settings = DosSettings(tmp_path, sampled=7, rounds=4, size=96)
    requests = {row.key: settings.request(row) for row in settings.rows}
    assert len(requests) == len(settings.rows) == 4 * 2 + 2 + 2 * 2
    wanted = ComparisonRequest(
        "zoo:randwire?regular=true&channels=150&size=96",
        ("cpu",), ("greedy", "merge", "dos"), (1,), 4, sampled=7, specialised="dos",
    )  # fmt: skip
    assert vars(requests["table5.randwire.cpu"]) == vars(wanted)
    for key in ("table5.randwire.v100", "table5.squeezenet.cpu", "table5.inception-v3.cpu"):
        assert requests[key].schedulers == ("greedy", "merge", "dos", "ios")
    assert requests["table5.randwire.v100"].sampled == 0
    assert requests["table1.inception-v3"].devices == ("cpu", "v100", "titan_xp", "2080ti")
    assert requests["table2.squeezenet.v100"].batches == (1, 2, 4, 8, 16)


@pytest.mark.parametrize(
    ("devices", "error", "words"),
    [
        ((), UsageError, "--device"),
        (("abacus",), MachineError, "abacus"),
        (("2 x v100",), UsageError, "name one"),
        (("cuda:0",), UsageError, "CUDA"),
    ],
)
def test_devices_that_cannot_be_had_are_refused_before_anything_runs(
    tmp_path, devices, error, words
):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(error, match=words):
        DosSettings(tmp_path, devices)


@pytest.mark.parametrize("device", ["cuda:1", "cuda:x", "cuda:"])
def test_a_gpu_that_this_machine_does_not_have_is_named(tmp_path, monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UsageError, match=f"'{device}' is not here; torch sees cuda:0 to cuda:0"):
        DosSettings(tmp_path, (device,))


def refuse(*_arguments, **_options):
    raise AssertionError("computed again")


def test_presets_are_predicted_kept_and_shown(tiny, tmp_path, monkeypatch):
    settings, told = DosSettings(tmp_path / "out", **PRESETS), []
    found = run_rows(settings, tell=lambda text, share: told.append(share))
    assert not found.failures and not found.missing and told[-1] == 1.0
    assert found.computed == len(settings.rows) == 2 + 1 + 1
    assert {line["source"] for line in found.lines} == {"predicted"}
    shown = tables(found.lines)
    assert list(shown) == ["table 5", "work", "search", "table 1", "table 2", "figure 6", "blocks"]
    # Made for one device and run there, a schedule is as fast as the least of its row.
    for name in ("table 1", "table 2"):
        ours = [row for row in shown[name].rows if row[2] == "predicted"]
        assert ours and not any("-0" in cell or "(-" in cell for row in ours for cell in row)
    with monkeypatch.context() as patch:
        patch.setattr(dos, "compare", refuse)
        assert run_rows(settings) == replace(found, computed=0)
        other = run_rows(replace(settings, batches=(1, 2)), rows="table2.*")
        assert list(other.failures) == other.missing == ["table2.squeezenet.v100"]
        assert "computed again" in other.failures["table2.squeezenet.v100"]
        # A row that fails takes none of the others along.
        assert other.lines == [x for x in found.lines if not x["row"].startswith("table2")]
        forgotten = run_rows(settings, rows="table1.*", fresh=True)
        assert list(forgotten.failures) == forgotten.missing == ["table1.squeezenet"]
    with pytest.raises(UsageError, match=r"'table9' matches none of table5\.squeezenet\.v100"):
        run_rows(settings, rows="table9")


def test_the_cores_of_this_machine_are_measured(tiny, tmp_path):
    settings = DosSettings(tmp_path, ("cpu",), (1, 2), rounds=2, sampled=4)
    found = run_rows(settings, rows="*.squeezenet*")
    assert not found.failures, found.failures
    shown = tables(found.lines)
    assert list(shown)[-2:] == ["figure 7", "blocks"]
    here, *published = shown["table 5"].cells
    assert here[1:3] == ("cpu", "measured") and "-" not in here[3:8]
    assert [row[2] for row in published] == ["published"] * 2
    (pairs,) = shown["figure 7"].cells
    samples = [line for line in found.lines if line["kind"] == "sample"]
    assert 1 < len(samples) <= 4 and pairs[2] == str(len(samples))
    sources = {row[1]: row[2] for row in shown["table 1"].cells}
    assert sources == {"cpu": "measured", **dict.fromkeys(dos.PAPER_DEVICES, "predicted")}
    assert [row[1:3] for row in shown["table 2"].cells] == [("1", "measured"), ("2", "measured")]
    gains = {row[3]: row[4:] for row in shown["figure 6"].cells}
    assert {"greedy", "merge", "dos"} <= gains.keys() and "sequential" not in gains
    page = render(found.lines, missing=found.missing, facts=[("command", "made <here>")])
    assert "made &lt;here&gt;" in page and "<script" not in page
    assert "Not computed: table5.inception-v3.cpu" in page
    assert page.count("<svg") >= 3  # speed-ups over batches, random schedules, parts


def test_a_gpu_is_measured_by_the_same_rows(tiny, tmp_path, monkeypatch):
    fake = FakeCuda()

    class Network(cuda.CudaNetwork):
        __init__ = partial_init(cuda.CudaNetwork, fake)

    class Clock(cuda.StageClock):
        __init__ = partial_init(cuda.StageClock, fake)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "A fake")
    monkeypatch.setattr(targets, "place", lambda p, given, _: preparing.place(p, given, "cpu"))
    monkeypatch.setattr(targets, "CudaNetwork", Network)
    monkeypatch.setattr(targets, "StageClock", Clock)
    settings = DosSettings(tmp_path, ("cuda:0",), (1, 2), rounds=1, sampled=2)
    found = run_rows(settings, rows="table?.squeezenet*")
    assert not found.failures, found.failures
    assert (tmp_path / "rows" / "table5.squeezenet.cuda-0.json").exists()
    on_gpu = [line for line in found.lines if line["device"] == "cuda:0"]
    assert {x["source"] for x in on_gpu if x["kind"] != "block"} == {"measured"}
    assert {line["name"] for line in on_gpu} == {"A fake"}
    assert {"table 5", "table 1", "table 2", "figure 6", "figure 7"} <= tables(found.lines).keys()


def partial_init(of, fake):
    def init(self, *arguments, **options):
        of.__init__(self, *arguments, **options, cuda=fake)

    return init


def line(row, kind, **values):
    network = row.split(".")[1]
    return {"row": row, "kind": kind, "network": network, "batch": "1", **values}


def made_up():
    """A row of table 5 and one of each of tables 1 and 2, on a device that is measured."""
    lines = []
    work = {
        "states": "5", "timed": "3", "search_seconds": ".5", "measuring_seconds": "2",
        "launches": "90", "multiply_adds": "5.5e9", "moved_bytes": "1e8",
    }  # fmt: skip
    for batch, seconds in (("1", (0.04, 0.05)), ("8", (0.3, 0.2))):
        for table in ("table5", "table2") if batch == "1" else ("table2",):
            for scheduler, value in zip(("sequential", "dos"), seconds, strict=True):
                lines.append(line(
                    f"{table}.inception-v3.cpu", "schedule", device="cpu", source="measured",
                    scheduler=scheduler, chosen=str(scheduler == "sequential"),
                    seconds=str(value), **work,
                ) | {"batch": batch})  # fmt: skip
    for batch, row in (("1", (0.02, 0.03)), ("8", (0.25, 0.2))):
        for made_for, value in zip(("1", "8"), row, strict=True):
            lines.append(line(
                "table2.inception-v3.cpu", "elsewhere", device="cpu", source="measured",
                made_for=made_for, seconds=str(value),
            ) | {"batch": batch})  # fmt: skip
    for device, row in (("cpu", (0.02, 0.03)), ("v100", (0.005, 0.004))):
        for made_for, value in zip(("cpu", "v100"), row, strict=True):
            lines.append(line(
                "table1.inception-v3", "elsewhere", device=device, made_for=made_for,
                source="measured" if device == "cpu" else "predicted", seconds=str(value),
            ))  # fmt: skip
    for predicted, seconds in ((1.0, 1.0), (2.0, 3.0), (3.0, 2.9)):
        lines.append(line(
            "table5.inception-v3.cpu", "sample", device="cpu", source="measured", spread=".1",
            predicted_seconds=str(predicted), seconds=str(seconds),
        ))  # fmt: skip
    for block, kernels, ours in (("1", "1", 1.0), ("2", "4", 0.5)):
        for scheduler, value in (("sequential", 1.0), ("dos", ours)):
            lines.append(line(
                "table5.inception-v3.cpu", "block", device="cpu", source="predicted", block=block,
                scheduler=scheduler, kernels=kernels, predicted_seconds=str(value),
            ))  # fmt: skip
    return lines


def test_ours_stand_beside_the_papers_figures():
    shown = tables(made_up())
    assert [row[1:] for row in shown["table 5"].cells] == [
        ("cpu", "measured", "40.0", "-", "-", "50.0", "-", "sequential, 40.0", "-", "-", "-"),
        ("V100, DOS", "published", "-", "-", "-", "4.61", "-", "-", "-", "-", "5.11"),
        ("V100, IOS's code", "published", "6.51", "4.62", "5.39", "-", "4.03", "-", "7.95", "4.88",
         "5.21"),
    ]  # fmt: skip
    assert shown["work"].cells[0][3:] == ("90 / 103", "5.50 / 5.50", "100 / 68", "0.11 / 1.19")
    assert shown["search"].cells == [
        ("InceptionV3", "cpu", "dos", "5", "3", "0.5", "2", "10")
    ]  # fmt: skip
    assert shown["table 1"].head[3:] == ("for cpu", "for v100")
    assert [row[1:] for row in shown["table 1"].cells] == [
        ("cpu", "measured", "20.0", "30.0 (+50.0 %)"),
        ("v100", "predicted", "5.00 (+25.0 %)", "4.00"),
        ("titan_xp", "DOS", "-", "6.27"),
        ("v100", "DOS", "-", "4.65"),
        ("2080ti", "DOS", "-", "4.43"),
    ]
    assert [row[1:] for row in shown["table 2"].cells] == [
        ("1", "measured", "20.0", "30.0 (+50.0 %)"),
        ("8", "measured", "250 (+25.0 %)", "200"),
        ("1", "DOS", "4.66", "4.73"),
        ("8", "DOS", "10.98", "10.55"),
        ("16", "DOS", "17.43", "16.94"),
    ]
    assert [row[3:] for row in shown["figure 6"].cells] == [("dos", "0.800", "1.500")]
    # All three pairs but one are in the predicted order, and that one lies within the noise.
    assert shown["figure 7"].cells[0][2:] == (
        "3", "3", "66.7 %", "93.7 %", "10.0 %", "2", "100.0 %"
    )  # fmt: skip
    assert shown["blocks"].cells == [("InceptionV3", "cpu", "1", "2.000", "2.000", "2.000")]


def test_tables_come_from_the_file_as_they_come_from_the_lines(tmp_path):
    save_csv(made_up(), tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open(newline="") as file:
        read = tables(list(csv.DictReader(file)))
    assert {key: (table.head, table.cells) for key, table in read.items()} == {
        key: (table.head, table.cells) for key, table in tables(made_up()).items()
    }


def test_the_script_writes_every_table_of_the_readme(tmp_path):
    """Into a copy: the marks of `benchmarks/dos/README.md` are those that the script fills."""
    (tmp_path / "README.md").write_text((BENCHMARKS / "dos" / "README.md").read_text())
    save_csv(made_up(), tmp_path / "rows.csv")
    with benchmark_scripts("dos", "readme") as scripts:
        assert set(scripts.readme.NAMES) == tables(made_up()).keys()
        scripts.readme.main(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "Not computed." not in text
    assert "| v100 | predicted | 5.00 (+25.0 %) | 4.00 |" in text


SMALL = ("--device", "v100", "--batch", "1,2", "--rows", "*.squeezenet*", "--out", "tables")


def test_the_command_writes_page_and_file_and_goes_on(bench, tiny, tmp_path):
    status, out, err = bench("dos", *SMALL)
    assert status == 0, err
    assert "Table 5: milliseconds" in out and "Figure 6: speed-up" in out
    page = (tmp_path / "tables" / "index.html").read_text()
    assert "python -m reproductions dos --device v100 --batch 1,2" in page
    status, out, err = bench("dos", *SMALL, "--json")
    printed = json.loads(out)
    assert status == 0 and printed["tasks"] == 0
    assert "table5.inception-v3.v100" in printed["missing"]
    lines = list(csv.DictReader((tmp_path / "tables" / "rows.csv").open(newline="")))
    assert [x["seconds"] for x in lines] == [x.get("seconds", "") for x in printed["lines"]]


def test_other_sizes_are_marked_and_a_row_that_fails_ends_with_status_1(bench, tmp_path):
    status, _, err = bench("dos", *SMALL[:4], "--rows", "table1.inc*", "--out", "x", "--size", 8)
    assert status == 1
    assert "not of the networks' own size" in err
    assert "table1.inception-v3 failed:" in err and "Calculated output size" in err
    assert "Traceback" not in err
    assert "not of the networks&#39; own size" in (tmp_path / "x" / "index.html").read_text()


def test_lines_say_of_which_size_their_images_were(tiny, tmp_path):
    row = "table5.squeezenet.v100"
    (of_another, *_) = run_rows(DosSettings(tmp_path / "a", **PRESETS, size=48), rows=row).lines
    (of_its_own, *_) = run_rows(DosSettings(tmp_path / "b", **PRESETS), rows=row).lines
    assert of_another["size"] == "48" and "size" not in of_its_own


def test_the_readme_refuses_figures_of_other_sizes(tmp_path):
    save_csv([line | {"size": "8"} for line in made_up()], tmp_path / "rows.csv")
    with (
        benchmark_scripts("dos", "readme") as scripts,
        pytest.raises(SystemExit, match="not of the networks' own size"),
    ):
        scripts.readme.main(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("dos",), "--out: name the folder of the table, such as benchmarks/dos"),
        (("dos", "--out", "x", "--jobs", 1), "--jobs: does not go with dos"),
        (("dos", "--out", "x", "--learn", ""), "--learn: does not go with dos"),
        (("thesis", "--out", "x", "--rows", "a"), "--rows: does not go with thesis"),
        (("gdp", "--out", "x", "--device", "cpu"), "--device: does not go with gdp"),
        (("dos", "--out", "x", "--rows", "table9"), "matches none of table5.squeezenet.cpu"),
        (("dos", "--out", "x", "--batch", "1,0"), "'1,0' is not a list of numbers"),
        (("dos", "--out", "x", "--device", "abacus"), "abacus"),
    ],
)
def test_what_the_command_cannot_do_is_one_line(bench, arguments, words):
    status, _, err = bench(*arguments)
    assert status == 2 and words in err and "Traceback" not in err
