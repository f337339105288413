"""Plans on several hosts. All ranks of these tests are on this machine, over its loopback."""

import json
import os
import re
import signal
import subprocess
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save as safetensors_bytes
from torch.distributed.checkpoint import load
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from dovetail.cli import using
from dovetail.errors import FileFormatError, UsageError
from dovetail.executors.hosts import HostPart, LinkTimes, _SlotBuffer, deal
from dovetail.executors.placed import part_bytes
from dovetail.executors.rank_checkpoints import (
    INDEX,
    check_own,
    file_of,
    latest_in,
    load_tensors,
    read_index,
    save_index,
    save_part,
)
from dovetail.executors.shares import share_out, tensor_at
from dovetail.frontends import Adam, resolve
from dovetail.frontends.instructions import LAID, BlockSlot
from dovetail.frontends.runners import distinct
from dovetail.machine import Device, Machine, load_machine, local_machine, save_machine
from dovetail.machine.files import machine_from_dict, machine_to_dict
from dovetail.pipeline import hosts as pipeline_hosts
from dovetail.pipeline import timeline_of
from dovetail.runtime.ranks import place_of_ranks
from dovetail.runtime.shared import Block
from tests.executors.test_placed import training_step
from tests.support import forked
from tests.support.ending import gone
from tests.support.forked_ranks import ForkedRanks
from tests.support.hosts import (
    LSTM,
    core_devices,
    drawn_plan,
    is_there,
    machine_of,
    program,
)
from tests.support.own_loops import environment

FILE = file_of(0, 1)

# ── Which rank runs which device ──


@pytest.mark.parametrize(
    ("hosts", "ranks", "dealt"),
    [("", "aab", (0, 1, 2)), ("bab", "ab", (1, 0, 1)), ("bab", "bab", (0, 1, 2))],
    ids=["a rank a device in order", "a rank a host", "a rank a device of a host"],
)
def test_which_rank_runs_which_device(hosts, ranks, dealt):
    assert deal(machine_of(*core_devices(3, hosts)), list(ranks)) == dealt


@pytest.mark.parametrize(
    ("hosts", "ranks", "says"),
    [
        ((), ["a"] * 3, "there are 3 ranks, but ranks has 2 devices"),
        ("ab", ["a", "c"], "rank 1 is on host 'c', but ranks has a, b"),
        ("ab", ["a", "a"], "host 'a' has 1 devices and 2 ranks"),
        ("ab", ["a"], "host 'b' has 1 devices and 0 ranks"),
        (["a", ""], ["a", "b"], "device 'cpu1' of ranks names no host"),
    ],
)
def test_devices_that_do_not_deal_out_are_an_error(hosts, ranks, says):
    with pytest.raises(UsageError, match=says):
        deal(machine_of(*core_devices(2, hosts)), ranks)


def test_a_host_that_runs_nothing_has_no_rank():
    host, device = Device("host", "host", "host", 1), core_devices(1)[0]
    linked = machine_of(host, device)
    with pytest.raises(UsageError, match="device 'host' of ranks runs nothing"):
        deal(replace(linked, host="host"), ["a", "b"])


def test_a_machine_file_names_hosts(tmp_path):
    machine = machine_of(*core_devices(2, "ab"))
    save_machine(machine, tmp_path / "two.toml")
    assert load_machine(tmp_path / "two.toml") == machine
    assert 'host = "a"' in (tmp_path / "two.toml").read_text()


def test_a_rank_needs_memory_for_its_own_part_of_the_block_alone():
    captured = training_step()
    shares = share_out(drawn_plan(captured, machine_of(*core_devices(2)), 0), captured.graph)
    parts = [HostPart(shares, {t for t, _ in share.sources}) for share in shares.shares]
    sizes = [part_bytes([own], part) for own, part in zip(shares.shares, parts, strict=True)]
    assert all(0 < size < shares.size_bytes for size in sizes)
    assert max(sizes) < part_bytes(shares.shares, HostPart(shares)) <= shares.size_bytes
    # What goes from GPU to GPU takes none of it.
    straight = replace(parts[0], direct=[(0, 1), (1, 0)])
    assert part_bytes([shares.shares[0]], straight) < sizes[0]


GRID = torch.arange(48, dtype=torch.float32).reshape(4, 12)


@pytest.mark.parametrize(
    ("value", "sent_bytes"),
    [
        (GRID[:, 3:6], 48),
        (GRID.bfloat16()[::2, ::3], 16),
        (GRID.cfloat()[1:3, ::4], 48),
        (GRID[:1].expand(4, 12)[:, ::2], 24),
    ],
    ids=["a part", "bfloat16", "complex", "expanded"],
)
@pytest.mark.parametrize("skew", [0, 16, 63 & ~15])
def test_a_tensor_with_gaps_is_sent_without_them(value, sent_bytes, skew):
    shape, strides = tuple(value.shape), tuple(value.stride())
    size = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
    dtype = str(value.dtype).removeprefix("torch.")
    slot = BlockSlot(0, size * value.element_size(), shape, strides, dtype)
    blocks = [Block.create(4096) for _ in range(2)]
    distinct(tensor_at(blocks[0], slot, skew), strides).copy_(distinct(value, strides))
    sent, received = (_SlotBuffer(block, slot) for block in blocks)
    sent.pack(skew)
    assert sent.bytes.numel() == sent_bytes + 1 + 8 * len(shape)
    received.bytes.copy_(sent.bytes)
    assert received.unpack() == skew
    assert tensor_at(blocks[1], slot, skew).equal(value)


@pytest.mark.parametrize(
    ("value", "strides"), [(GRID.reshape(4, 1, 12), (12, 1, 1)), (GRID[:, ::2], (1, 8))]
)
def test_a_tensor_is_sent_as_it_lies_in_its_slot(value, strides):
    size = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) + 1
    slot = BlockSlot(0, 4 * size, tuple(value.shape), strides, "float32")
    blocks = [Block.create(4096) for _ in range(2)]
    places = [
        BlockSlot(int(block.bytes.ctypes.data), slot.bytes, slot.shape, strides, slot.dtype)
        for block in blocks
    ]
    places[0].laid[:] = value.stride()
    places[0].tensor(LAID | 16).copy_(value)
    sent, received = (_SlotBuffer(block, slot) for block in blocks)
    sent.pack(LAID | 16)
    received.bytes.copy_(sent.bytes)
    assert received.unpack() == LAID | 16
    got = places[1].tensor(LAID | 16)
    assert got.equal(value) and got.stride() == value.stride()


def test_a_tensor_without_gaps_is_sent_from_its_slot():
    block = Block.create(4096)
    buffer = _SlotBuffer(block, BlockSlot(128, 96, (4, 6), (1, 4), "float32"))
    assert buffer.bytes.data_ptr() == torch.from_numpy(block.bytes).data_ptr() + 128


# ── What they compute ──


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module", params=[2, 3])
def compared(request, checkpoints):
    """What each rank found to differ from one process, over random placements; of three ranks also
    of a larger network, and of two what differs after going on from a checkpoint and on GPUs, and
    the machine that both are."""
    text = program(
        "from dovetail.machine.files import machine_to_dict\n"
        "from dovetail.pipeline.hosts import machine_of_hosts\n"
        "with join(f'box{rank}') as ranks:\n"
        f"  machine = machine_of(*core_devices({request.param}))\n"
        "  tied = training_step(momentum=0.9)\n"
        "  result = {'tied': differing(tied, machine, range(2), ranks)}\n"
        "  result['pipelines'] = differing_pipelines(an_lstm(), ranks)\n"
        "  if ranks.ranks == 3:\n"
        "    result['lstm'] = differing(an_lstm(), machine, range(2), ranks)\n"
        "  else:\n"
        "    result['machine'] = machine_to_dict(machine_of_hosts('here', ranks))\n"
        f"    result['resumed'] = resumed(tied, ranks, {str(checkpoints)!r})\n"
        "    result['gpus'] = differing_on_gpus(tied, ranks)\n"
    )
    with ForkedRanks(request.param, text) as ranks:
        return ranks.results()


@pytest.mark.parametrize("compared", [3], indirect=True)
def test_random_placements_on_ranks_change_no_bit(compared):
    assert [found["lstm"] for found in compared] == [[]] * len(compared)


def test_views_ties_buffers_and_random_ops_survive_any_placement_on_ranks(compared):
    assert [found["tied"] for found in compared] == [[]] * len(compared)


def test_pipelines_on_ranks_change_no_bit(compared):
    assert [found["pipelines"] for found in compared] == [[]] * len(compared)


@pytest.mark.parametrize("compared", [2], indirect=True)
def test_random_placements_on_gpus_of_two_hosts_change_no_bit(compared):
    """Their tensors go straight from GPU to GPU, by a NCCL that gloo plays."""
    for differing, pairs in (found["gpus"] for found in compared):
        assert differing == []
        assert pairs >= 4, "each way, of each placement but the one through memory"


def test_ranks_on_one_machine_listen_on_its_loopback_alone(compared):
    assert not any("listens" in what for rank in compared for what in rank["tied"])


@pytest.mark.parametrize("compared", [2], indirect=True)
def test_a_plan_with_other_devices_goes_on_from_a_checkpoint_to_the_bit(compared):
    assert [found["resumed"] for found in compared] == [[2, [], []]] * 2


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("compared", [2], indirect=True)
def test_other_tools_read_a_checkpoint(compared, checkpoints):
    captured = training_step(momentum=0.9)
    weights = {name: torch.zeros_like(p) for name, p in captured.module.named_parameters()}
    load(weights, storage_reader=HuggingFaceStorageReader(str(latest_in(checkpoints))))
    assert all(value.abs().sum() > 0 for value in weights.values())


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: (folder / "latest").unlink(), "no checkpoint there"),
        (lambda folder: (folder / "latest").write_text("../step-2"), "names no checkpoint"),
        (lambda folder: (folder / "step-2" / FILE).write_bytes(b"short"), "header"),
        (lambda folder: _say(folder, FILE, "../o.safetensors"), "it has no file for 'bias'"),
        (lambda folder: save_part(folder, 2, FILE, {"bias": torch.ones(4)}), "of shape (4,)"),
        (lambda folder: _say(folder, ": 2,", ": 1e400,"), "its dovetail_step is no number"),
        (lambda folder: _say(folder, ": 2,", ": -1,"), "its dovetail_step is no number"),
        (lambda folder: (folder / "step-2" / INDEX).write_text("[]"), "not an index"),
    ],
)
def test_a_broken_checkpoint_is_an_error_that_names_it(damage, says, tmp_path):
    save_part(tmp_path, 2, FILE, {"bias": torch.ones(3)})
    save_index(tmp_path, 2, {FILE: ["bias"]})
    damage(tmp_path)
    with pytest.raises(FileFormatError, match=re.escape(says)):
        load_tensors(latest_in(tmp_path), {"bias": torch.zeros(3)})


def _say(folder, old, new):
    """Have the index say something else."""
    index = folder / "step-2" / INDEX
    assert old in index.read_text()
    index.write_text(index.read_text().replace(old, new))


def _keep(folder, step, run=""):
    save_part(folder, step, FILE, {"bias": torch.full((3,), float(step))})
    save_index(folder, step, {FILE: ["bias"]}, run)


def test_older_checkpoints_are_removed(tmp_path):
    for step in range(1, 6):
        _keep(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-4", "step-5"]
    found = torch.zeros(3)
    assert load_tensors(latest_in(tmp_path), {"bias": found}) == 5
    assert found.tolist() == [5, 5, 5]


def test_only_this_runs_own_checkpoints_are_removed(tmp_path):
    _keep(tmp_path, 1, "another")
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2" / "thesis.tex").write_text("of years")
    (tmp_path / "step-3").write_text("a file")
    _keep(tmp_path / "elsewhere", 4)
    (tmp_path / "step-4").symlink_to(tmp_path / "elsewhere" / "step-4")
    for step in range(5, 10):
        _keep(tmp_path, step, "this")
        (tmp_path / "step-5" / "notes").write_text("beside a checkpoint")
    kept = ["elsewhere", "latest", *(f"step-{n}" for n in (1, 2, 3, 4, 5, 8, 9))]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept
    assert (tmp_path / "step-2" / "thesis.tex").read_text() == "of years"
    assert sorted(path.name for path in (tmp_path / "step-5").iterdir()) == [FILE, INDEX, "notes"]
    assert sorted(path.name for path in (tmp_path / "step-4").iterdir()) == [FILE, INDEX]


def _thesis(folder):
    (folder / "step-1").mkdir()
    (folder / "step-1" / "thesis.tex").write_text("of years")


@pytest.mark.parametrize(
    ("foreign", "names"),
    [
        (_thesis, "step-1/thesis.tex"),
        (lambda folder: (folder / "step-1").write_text("a file"), "step-1"),
        (lambda folder: (folder / "step-2" / "more").mkdir(), "step-2/more"),
        # A sharded model of another tool has the same names.
        (lambda folder: _say(folder, '"dovetail_step": 2,', ""), f"step-2/{INDEX}"),
        (lambda folder: _say(folder, '_step": 2,', '_step": 3,'), f"step-2/{INDEX}"),
        (lambda folder: _keep(folder, 3, "another"), "step-3 is another run's"),
    ],
)
def test_a_run_is_not_begun_where_something_else_has_the_name_of_a_checkpoint(
    foreign, names, tmp_path
):
    _keep(tmp_path, 2, "this")
    check_own(tmp_path, "this")
    (tmp_path / "notes").write_text("beside checkpoints")
    check_own(tmp_path, "this")
    foreign(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match=rf"--checkpoint: .*{re.escape(names)}"):
        check_own(tmp_path, "this")
    assert sorted(tmp_path.rglob("*")) == before


def test_what_a_killed_run_has_left_is_its_own(tmp_path):
    _keep(tmp_path, 2, "this")
    save_part(tmp_path, 3, FILE, {"bias": torch.zeros(3)})
    (tmp_path / "step-3" / f".{file_of(1, 2)}.abcd_123").touch()
    (tmp_path / "step-4").mkdir()
    check_own(tmp_path, "this")
    # A part of a sharded model of another tool is not.
    (tmp_path / "step-4" / FILE).write_bytes(safetensors_bytes({"a": torch.zeros(1)}))
    with pytest.raises(UsageError, match=f"step-4/{FILE} is no part"):
        check_own(tmp_path, "this")


def test_a_checkpoint_of_an_earlier_version_is_gone_on_from(tmp_path):
    _keep(tmp_path, 2)
    _say(tmp_path, ',\n  "dovetail_run": ""', "")
    run = read_index(latest_in(tmp_path)).run
    check_own(tmp_path, run)
    for step in (3, 4):
        _keep(tmp_path, step, run)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-3", "step-4"]


# ── The command ──


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    """A plan of a small network on two devices of this machine."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("a plan on two devices needs two cores")
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    machine = local_machine("here/2")
    step = resolve(LSTM, train=Adam(lr=1e-3))
    plan = replace(drawn_plan(step, machine, 0), source=replace(step.source, model=LSTM))
    # Opening a plan checks its promises.
    timeline = timeline_of(plan, step.graph)
    peaks = tuple(timeline.peak_memory_bytes.tolist())
    replace(plan, value=timeline.step_seconds, lower_bound=0.0, peak_memory_bytes=peaks).save(path)
    return path


def torchrun(*words, **variables):
    """A launcher of two ranks of a command, without the imports of the launcher."""
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "dovetail", *words]
    return forked.start(command, cwd=os.getcwd(), env=environment(**variables))


def worked(launcher):
    """What a launcher whose command must succeed has written: (output, errors)."""
    out, errors = launcher.communicate(timeout=240)
    assert launcher.returncode == 0, errors
    return out, errors


def test_torchrun_runs_a_plan_and_rank_0_tells_of_it(plan_file, tmp_path):
    folder = str(tmp_path / "kept")
    words = ["--json", "--steps", "4", "--checkpoint", folder, "--every", "5"]
    out, errors = worked(torchrun("run", str(plan_file), *words))
    told = json.loads(out)
    assert told["steps"] == 4
    assert told["median_seconds"] > 0
    # torchrun's own lines aside, rank 1 says nothing.
    assert "error" not in errors
    # Two steps warm up, four count, and three are stamped.
    assert latest_in(tmp_path / "kept").name == "step-5"


def test_torchrun_measures_the_ranks_of_one_host_and_the_links_between_them(tmp_path):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two ranks share the cores of a host")
    path = tmp_path / "machine.toml"
    out, _ = worked(torchrun("machine", "--hosts", "--out", str(path)))
    assert out.count("GB/s") > 0
    machine = load_machine(path)
    assert len(machine.devices) == 2
    assert len({device.host for device in machine.devices}) == 1
    assert not {*machine.devices[0].cores} & {*machine.devices[1].cores}
    assert {link.channel for link in machine.links} == {"rank 0 -> rank 1", "rank 1 -> rank 0"}


@pytest.mark.parametrize("compared", [2], indirect=True)
def test_a_machine_of_two_hosts_has_what_each_has_and_links_that_were_measured(compared):
    found, other = (machine_from_dict(result["machine"]) for result in compared)
    assert found == other
    assert [device.host for device in found.devices] == ["box0", "box1"]
    assert found.devices[0].cores == found.devices[1].cores == local_machine().devices[0].cores
    assert {(link.source, link.destination) for link in found.links} == {
        ("box0/cpu0", "box1/cpu0"),
        ("box1/cpu0", "box0/cpu0"),
    }
    for link in found.links:
        # Loopback is slower than memory, and a message takes less than a second.
        assert 1e6 < link.bandwidth_bytes_per_second < 1e12
        assert 0 < link.latency_seconds < 1
        assert 0 <= link.send_seconds < 1
        assert 0 <= link.receive_seconds < 1


class PlayedRanks:
    """Rank 0 of two hosts, of which the other one says what is given."""

    hosts, host, rank, ranks = ("box0", "box1"), "box0", 0, 2

    def __init__(self, other):
        self.other = other

    def gather(self, _name, own):
        return [own, self.other]


def test_links_between_hosts_have_what_each_end_was_measured_to_take(monkeypatch):
    def part(kind):
        device = replace(machine_of(*core_devices(1)).devices[0], name="d", kind=kind, cores=())
        return Machine("here", (device,), "d")

    times = {
        (0, 1): LinkTimes({4096: 1e-4, 1048576: 1e-2}, 1e-4, 2e-5),
        (1, 0): LinkTimes({4096: 1e-4, 1048576: 1e-2}, 3e-4, 4e-5),
    }
    monkeypatch.setattr(pipeline_hosts, "measure_links", lambda ranks: times)
    monkeypatch.setattr(pipeline_hosts, "resolve_machine", lambda *_, **__: part("cpu"))
    # A GPU's thread needs 60 us at least.
    expected_of = {
        "cpu": [(1e-4, 2e-5), (3e-4, 4e-5)],
        "gpu": [(1e-4, 6e-5), (3e-4, 4e-5)],
    }
    for kind, expected in expected_of.items():
        ranks = PlayedRanks(machine_to_dict(part(kind)))
        links = pipeline_hosts.machine_of_hosts("here", ranks).links
        assert [(link.send_seconds, link.receive_seconds) for link in links] == expected


def test_going_on_needs_a_folder_and_several_ranks(plan_file, tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UsageError, match="--resume: goes on from --checkpoint DIR"):
        using.run(plan_file, resume=True)
    with pytest.raises(UsageError, match="--every: says how often --checkpoint DIR is written"):
        using.run(plan_file, every=5)
    with pytest.raises(UsageError, match="--checkpoint: is of a run on several ranks"):
        using.run(plan_file, checkpoint=tmp_path)


def test_a_folder_that_holds_something_else_is_refused_before_the_run_starts(tmp_path):
    _thesis(tmp_path)
    with pytest.raises(UsageError, match=r"--checkpoint: .*step-1/thesis.tex is no part"):
        using.run(tmp_path / "no plan", checkpoint=tmp_path)
    (tmp_path / "kept").mkdir()
    _keep(tmp_path / "kept", 2, "another")
    with pytest.raises(UsageError, match=r"step-2 is another run's; go on from it with --resume"):
        using.run(tmp_path / "no plan", checkpoint=tmp_path / "kept")
    with pytest.raises(FileFormatError, match="no plan"):
        using.run(tmp_path / "no plan", checkpoint=tmp_path / "kept", resume=True)


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE: is 2, but RANK, MASTER_ADDR, MASTER_PORT is not set"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE: must be a whole number, not 'two'"),
        (
            {"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "1"},
            "RANK: is 2, but WORLD_SIZE is 2",
        ),
    ],
)
def test_variables_of_a_launcher_that_make_no_sense_are_refused(variables, says, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=re.escape(says)):
        place_of_ranks("box")


def test_one_rank_is_a_run_without_ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert place_of_ranks("box") is None


# ── What happens when a rank is lost ──

FAULTS = {
    "raises": "raise ValueError('a fault')",
    "is killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "is stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    "is killed with its GPU": "os.kill(os.getpid(), signal.SIGKILL)",
}
SAID = {
    "raises": "ValueError('a fault')",
    "is killed": "connection",
    "is stopped": "silent",
    "is killed with its GPU": "connection",
}


@pytest.fixture(scope="module")
def lost():
    """Fault of rank 1 -> how each rank ended. No process is left."""

    def with_fault(fault):
        text = program(
            "from dovetail.runtime import ranks as told\n"
            "told.SILENT_SECONDS, told.STOPPED_SECONDS = 7.0, 9.0\n"
            f"def fault():\n  {FAULTS[fault]}\n"
            "with join(f'box{rank}') as ranks:\n"
            f"  until_lost(training_step(), ranks, fault, gpus={'GPU' in fault})\n"
            "result = 0\n"
        )
        # A third one must name the rank that was lost, not one that ended because of it.
        return ForkedRanks(3 if fault == "is killed" else 2, text)

    def ends_of(ranks):
        ends = ranks.ends()
        pids = [pid for _, out, _ in ends for pid in json.loads(out.splitlines()[0])]
        assert all(map(gone, pids))
        return ends

    # That a rank is stopped is known after many seconds, in which the others are lost.
    with with_fault("is stopped") as stopped:
        found = {}
        for fault in FAULTS:
            if fault != "is stopped":
                with with_fault(fault) as ranks:
                    found[fault] = ends_of(ranks)
        return found | {"is stopped": ends_of(stopped)}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_lost_rank_ends_the_run_on_all_with_one_error(fault, lost):
    ends = lost[fault]
    for status, _, said in (ends[0], *ends[2:]):
        assert status == 1
        assert said.startswith("dovetail.errors.RankLostError: rank 1 on host box1 was lost")
        assert SAID[fault] in said
    assert ends[1][0] != 0


def test_what_a_gpu_raises_ends_the_run_on_all_though_others_wait_for_it():
    text = program(
        "with join(f'box{rank}') as ranks:\n  until_raised(training_step(), ranks)\nresult = 0\n"
    )
    with ForkedRanks(2, text) as ranks:
        ends = ranks.ends()
    assert [status for status, _, _ in ends] == [1, 1]
    assert "rank 1 on host box1 was lost in op 'sigmoid'" in ends[0][2]
    assert "not a number" in ends[0][2]


KINDS = {
    "run": ["--steps", "1000000"],
    "train": ["--backend", "ranks", "--workers", "2", "--epochs", "100000"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_end_with_their_torchrun(kind, plan_file, tmp_path):
    what = str(plan_file) if kind == "run" else "tests.support.trained_models:quadrants"
    variables = {"TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    launcher = torchrun(kind, what, *KINDS[kind], **variables)
    try:
        ranks = _ranks_of(launcher)
    finally:
        launcher.kill()
        launcher.wait()
    deadline = time.monotonic() + 10
    try:
        while any(map(is_there, ranks)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(map(is_there, ranks))
    finally:
        for pid in filter(is_there, ranks):
            os.kill(pid, signal.SIGKILL)


def _ranks_of(launcher):
    """The processes of two ranks that are at work, and those below them."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and launcher.poll() is None:
        ranks = [[rank, *below(rank)] for rank in children_of(launcher.pid)]
        # Each has a fork server, and what that or it has started.
        if len(ranks) == 2 and all(len(pids) > 2 for pids in ranks):
            time.sleep(1)
            return [pid for rank in ranks for pid in rank]
        time.sleep(0.2)
    launcher.kill()
    with suppress(subprocess.TimeoutExpired):  # ranks that are left hold its pipes
        raise AssertionError(launcher.communicate(timeout=10))
    raise AssertionError("the ranks did not start, and outlived their launcher")


def children_of(pid):
    with suppress(OSError):
        return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def below(pid):
    """A process's children, and theirs."""
    return [each for child in children_of(pid) for each in (child, *below(child))]


@pytest.fixture(scope="module")
def hung():
    """Whether a device of rank 1 was stopped -> how each rank ended. Both take long to be known, so
    they are tried side by side."""
    with ExitStack() as both:
        ranks = {}
        for stops in (True, False):
            text = program(
                "with join(f'box{rank}') as ranks:\n"
                f"  until_hung(training_step(), ranks, {stops})\n"
                "result = 0\n"
            )
            ranks[stops] = both.enter_context(ForkedRanks(2, text))
        return {stops: of.ends() for stops, of in ranks.items()}


@pytest.mark.parametrize(
    ("stops", "says"),
    [(True, "was stopped for 6 s"), (False, "was lost in op 'sigmoid': it has run for")],
)
def test_a_device_that_hangs_ends_the_run_on_all(stops, says, hung):
    """The rank itself is alive, and shows it."""
    ends = hung[stops]
    assert [status for status, _, _ in ends] == [1, 1]
    for _, _, said in ends:
        assert "rank 1 on host box1 was lost" in said
        assert says in said
    assert all(gone(pid) for _, out, _ in ends for pid in json.loads(out.splitlines()[0]))
