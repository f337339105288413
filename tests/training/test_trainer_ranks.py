"""Training on several ranks: all of them are on this machine, over its loopback."""

import hmac
import json
import os
import signal
import socket
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from dovetail.errors import UsageError
from dovetail.training.backends.contract import Watcher
from dovetail.training.backends.ranks import connections
from dovetail.training.backends.ranks.connections import Door, connect
from dovetail.training.backends.ranks.meeting import RanksOptions
from dovetail.training.backends.simulated import run as simulate
from dovetail.training.request import TrainRequest
from tests.support import forked
from tests.support.ending import gone
from tests.support.forked_ranks import ForkedRanks
from tests.support.hosts import LOOPBACK
from tests.support.listening import _bound, _inodes, _tree
from tests.support.own_loops import environment, program
from tests.support.process_learners import assign
from tests.support.trained_models import network

TRAINED = "tests.support.trained_models:quadrants"
TOKEN = b"t" * 32

BACKEND = """
from dataclasses import replace
from dovetail.errors import DovetailError
from dovetail.training.backends import load_backend
from dovetail.training.backends.contract import FailurePolicy, Watcher
from tests.support.process_learners import Sitting, assign, count
run = load_backend("ranks")
"""


def start(body, ranks=2, **values):
    """Ranks of a program in which `values` are there."""
    named = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    return ForkedRanks(ranks, program(BACKEND + named + textwrap.dedent(body)))


def results(body, ranks=2, **values):
    with start(body, ranks, **values) as started:
        return started.results()


def command(*arguments, ranks=2):
    """Ranks of the command line."""
    text = "import sys\nsys.argv = {!r}\nfrom dovetail.cli import main\nmain()\n"
    return ForkedRanks(ranks, text.format(["dovetail", *map(str, arguments)]))


def outputs(started):
    """(exit status, standard output, standard error) of each rank."""
    ends = [(process.communicate(timeout=100), process) for process in started.processes]
    return [(process.returncode, *texts) for texts, process in ends]


def wait_for(condition):
    """Waits for something to happen; if it does not, pytest's own limit ends the test."""
    while not (found := condition()):
        time.sleep(0.02)
    return found


def trains(process):
    """Whether a rank has started a worker, forked from a process that imported torch before."""
    return len(_tree(process.pid)) > 2


# ── What they compute ──

CASES = [("adag-agn", "topk:0.5"), ("aeasgd", "none"), ("sync", "bfloat16")]


@pytest.fixture(scope="module")
def compared():
    """The outcomes of simulated runs, and what three ranks make of the same turns."""
    wanted = [simulate(assign(rule, wire=wire, workers=3), Watcher()) for rule, wire in CASES]
    found = results(
        """
        outcomes = []
        for (rule, wire), order in zip(cases, orders):
            outcome = run(assign(rule, wire=wire, workers=3, order=tuple(order)), Watcher())
            losses = [(r.worker, r.sequence, r.staleness, r.loss) for r in outcome.rows]
            outcomes.append([outcome.theta.tobytes().hex(), losses, outcome.meta.get("rank", 0)])
        print(json.dumps(outcomes))
        """,
        ranks=3,
        cases=CASES,
        orders=[[int(worker) for worker in outcome.meta["order"]] for outcome in wanted],
    )
    return wanted, found


@pytest.mark.parametrize("case", range(len(CASES)))
def test_ranks_and_simulation_agree_bit_for_bit_on_a_forced_order(compared, case):
    wanted, found = compared[0][case], [rank[case] for rank in compared[1]]
    assert {theta for theta, _, _ in found} == {wanted.theta.tobytes().hex()}
    rows = [[r.worker, r.sequence, r.staleness, r.loss] for r in wanted.rows]
    assert found[0][1] == rows
    assert {row[0] for row in rows} == {0, 1, 2}


def test_other_ranks_than_the_first_return_the_result_without_rows(compared):
    for number, rank in enumerate(compared[1]):
        assert all(found == number for _, _, found in rank)
        assert all(bool(losses) == (number == 0) for _, losses, _ in rank)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What two ranks have after training a network with a batch norm, and after going on."""
    return results(
        """
        from torch import nn
        from dovetail.cli import FORKING, start_fork_server
        from tests.support.trained_models import arrays
        start_fork_server(FORKING["train"])
        torch.manual_seed(rank)  # rank 0's weights are trained
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        settings = {"batch": 24, "folder": folder, "callbacks": [dt.Callback()], "workers": 2}
        # Each rank has its share: else one may have taken all before the other has begun.
        settings["partition"] = "fixed"
        net[1].running_mean += rank  # it is computed anew
        train = lambda **more: dt.Trainer(
            net, nn.functional.cross_entropy, "adam", **settings, **more
        ).fit(arrays(), arrays(80, 1))
        counts = [0]

        def worsening(output, target):
            counts[0] -= 1
            return torch.tensor(float(counts[0]))

        state = lambda: {name: tensor.tolist() for name, tensor in net.state_dict().items()}
        # The best center is that of the first epoch, and the model ends with it.
        first = train(epochs=2, metrics=[worsening], monitor="worsening", patience=50)
        result = [[state(), len(first.outcome.rows), first.backend, first.summary()]]
        second = train(epochs=4, resume=True)
        workers = sorted({row.worker for row in second.outcome.rows})
        result.append([state(), sum(r.samples for r in second.outcome.rows), workers, ""])
        print(json.dumps(result))
        """,
        folder=str(tmp_path_factory.mktemp("ranks") / "run"),
    )


def test_all_ranks_end_with_the_same_weights_and_statistics(trained):
    for first, second in zip(*trained, strict=True):
        assert first[0] == second[0]
        assert first[0]["1.running_mean"] != [0.0] * 8
    assert trained[0][0][0] != trained[0][1][0]


def test_the_first_rank_keeps_and_resumes_the_run(trained):
    (_, commits, backend, _), (_, samples, workers, _) = trained[0]
    assert (commits, backend, samples, workers) == (20, "ranks", 4 * 240, [0, 1])
    assert trained[1][0][1] == trained[1][1][1] == 0


def test_controllers_of_ranks_learn_one_policy_and_all_ranks_return_it(tmp_path):
    tmp_path.joinpath("meeting").mkdir()
    found = results(
        """
        from dovetail.placers.learned.learner import parameters_of
        from dovetail.placers.learned.learning import learn
        from tests.support.learned_problems import random_task
        from tests.support.tiny_policies import Meeting, REINFORCE
        # One controller may have drawn all trials before the other has started.
        task, policy, told = random_task(1, 6), Meeting(6, 2, 2, meeting), []
        try:
            learn([task], policy, REINFORCE, trials=8, controllers=2, backend="ranks")
        except DovetailError as error:
            refused = error.line
        learned = learn(
            [task], policy, REINFORCE, trials=160, controllers=2, backend="ranks", folder=folder,
            progress=told.append,
        )
        points = sorted({(point.controller, point.update) for point in learned.points})
        result = learned.values[task.name], learned.placements[task.name].tolist(), points
        print(json.dumps([
            refused, parameters_of(policy).tolist(), *result, learned.trials, len(told),
        ]))
        """,
        folder=str(tmp_path / "run"),
        meeting=str(tmp_path / "meeting"),
    )
    first, second = found
    assert first[0].startswith("folder: all ranks write down what they try there")
    assert first[:-1] == second[:-1]
    assert first[1] != [[0.0] * 2] * 6
    assert {controller for controller, _ in first[4]} == {0, 1}
    assert first[5:] == [160, 20]
    assert second[6] == 0


# ── Who dies ──


def test_no_commit_is_lost_or_doubled_when_a_worker_a_rank_and_the_server_are_killed(tmp_path):
    body = """
        from pathlib import Path

        def first_time(name):
            try:
                open(f"{folder}/{name}", "x").close()
            except FileExistsError:
                return False
            return True

        def kill_server():
            # The worker and the server have one parent, rank 0.
            tasks = Path(f"/proc/{os.getppid()}/task")
            for task in tasks.iterdir():
                for pid in (task / "children").read_text().split():
                    if b"processes.server:serve" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        os.kill(int(pid), signal.SIGKILL)

        def hold(worker, seen):
            if worker == 1 and seen >= 8 and first_time("worker"):
                os.kill(os.getpid(), signal.SIGKILL)
            if worker == 2 and seen >= 20 and first_time("rank"):
                os.kill(os.getppid(), signal.SIGKILL)
                time.sleep(60)
            if worker == 0 and seen >= 60 and Path(f"{folder}/rank").exists():
                if first_time("server"):
                    kill_server()

        outcome = run(count(60, seconds=0.01, epochs=3, workers=3, hold=hold), Watcher())
        kinds = [event.kind for event in outcome.events]
        lost = [event.detail for event in outcome.events if event.kind == "lost"]
        print(json.dumps([outcome.theta.tolist(), outcome.meta, kinds, outcome.samples, lost]))
    """
    with start(body, ranks=3, folder=str(tmp_path)) as started:
        trees = [wait_for(lambda p=p: len(_tree(p.pid)) > 1 and _tree(p.pid)) for p in
                 started.processes]  # fmt: skip
        ends = outputs(started)
    assert [status for status, _, _ in ends] == [0, 0, -signal.SIGKILL], ends
    first, second = (json.loads(out.splitlines()[-1]) for _, out, _ in ends[:2])
    assert first[0] == second[0] == [3.0] * 60
    assert first[3] == 180
    assert first[1]["worker_deaths"] == 2
    assert first[1]["server_restarts"] == 1
    assert all(gone(pid) for tree in trees for pid in tree)


def test_a_rank_that_is_lost_counts_by_the_failure_policy():
    body = """
        def hold(worker, seen):
            if worker == 1 and seen >= 8:
                os.kill(os.getppid(), signal.SIGKILL)
                time.sleep(60)
            if worker == 0 and seen >= 30:
                time.sleep(60)  # else it may be done before the other is missed
        policy = FailurePolicy(worker_restarts=0)
        run(count(60, hold=hold, policy=policy), Watcher())
    """
    with start(body) as started:
        (status, _, said), (other, _, _) = started.ends()
    assert (status, other) == (1, -signal.SIGKILL)
    assert said.startswith("dovetail.errors.NoWorkersError: ")
    assert "rank 1 on host" in said


def test_without_the_first_rank_the_others_end_by_one_line():
    with command("train", TRAINED, "--epochs", 10**6) as started:
        for process in started.processes:
            wait_for(lambda p=process: trains(p))
        trees = [_tree(process.pid) for process in started.processes]
        first, second = started.processes
        first.kill()
        out, errors = second.communicate(timeout=60)
    assert (second.returncode, out) == (1, "")
    assert len(errors.splitlines()) == 1, errors
    assert errors.startswith("error: rank 0 on host 127.0.0.1 was lost between steps: ")
    assert all(gone(pid) for tree in trees for pid in tree)


def test_a_first_rank_that_says_nothing_is_lost_like_one_whose_host_is_gone():
    body = """
        from dovetail.training.backends.ranks import connections
        connections.SILENT_SECONDS = 4.0
        def hold(worker, seen):
            if rank == 0 and seen >= 8:
                os.kill(os.getppid(), signal.SIGSTOP)
        run(count(40, seconds=0.01, epochs=10**6, hold=hold), Watcher())
    """
    with start(body, ranks=3) as started:
        first, *others = started.processes
        for process in others:
            _, errors = process.communicate(timeout=60)
            assert process.returncode == 1
            said = "RankLostError: rank 0 on host 127.0.0.1 was lost between steps: it was silent"
            assert said in errors.splitlines()[-1]
        first.kill()
        first.communicate()


def test_a_rank_that_is_stopped_is_lost_and_the_others_go_on():
    body = """
        from dovetail.training.backends.ranks import connections
        connections.SILENT_SECONDS = 4.0
        def hold(worker, seen):
            if os.environ["RANK"] == "1" and seen >= 8:
                os.kill(os.getppid(), signal.SIGSTOP)
                time.sleep(60)
        outcome = run(count(40, seconds=0.01, hold=hold), Watcher())
        print(json.dumps([outcome.theta.tolist(), outcome.meta["worker_deaths"]]))
    """
    with start(body) as started:
        first, second = started.processes
        out, errors = first.communicate(timeout=100)
        assert first.returncode == 0, errors
        second.send_signal(signal.SIGCONT)
        _, said = second.communicate(timeout=100)
    theta, deaths = json.loads(out.splitlines()[-1])
    assert theta == [2.0] * 40
    assert deaths == 1
    assert second.returncode == 1
    assert said.splitlines()[-1].startswith("dovetail.errors.RankLostError: rank 0 ")


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """What torchrun leaves after Ctrl-C at the second of its ranks, and what these listened on:
    (status, standard output, standard error), the weights' path, (rank, protocol, address)."""
    folder = tmp_path_factory.mktemp("interrupted")
    launcher = forked.start(
        [
            "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2",
            "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m", "dovetail", "train",
            TRAINED, "--epochs", "1000000", "--validate", "1s", "--out", "weights.pt", "--json",
        ],
        cwd=folder, env=environment(),
    )  # fmt: skip
    try:
        ranks = wait_for(lambda: ranks_of(launcher.pid))
        wait_for(lambda: all(len(_tree(pid)) > 2 for pid in ranks))
        held = [{i for each in _tree(pid) for i in _inodes(each)} for pid in ranks]
        listening = [
            (rank, kind, address)
            for kind, address, inode in _bound()
            for rank, inodes in enumerate(held)
            if inode in inodes
        ]
        time.sleep(3)
        os.kill(ranks[1], signal.SIGINT)
        out, errors = launcher.communicate(timeout=60)
    finally:
        launcher.kill()
    return (launcher.returncode, out, errors), folder / "weights.pt", listening


def ranks_of(launcher):
    """The processes of torchrun's two ranks, in order; None until both are there."""
    found = {}
    for pid in _tree(launcher):
        with suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher:
                found |= {int(v[5:]): pid for v in variables if v.startswith(b"RANK=")}
    return [found[rank] for rank in (0, 1)] if len(found) == 2 else None


def test_ctrl_c_at_any_rank_keeps_the_best_so_far_and_ends_all(interrupted):
    (status, out, errors), weights, _ = interrupted
    assert status == 0, errors
    assert errors.count("interrupted: this is the best so far") == 1
    assert json.loads(out)["interrupted"]
    assert torch.load(weights, weights_only=True)


def test_the_first_rank_of_torchrun_alone_reports(interrupted):
    (_, out, errors), _, _ = interrupted
    summary = json.loads(out)
    assert (summary["backend"], summary["workers"]) == ("ranks", 2)
    for line in ("training tests.support.trained_models:quadrants", "wrote "):
        assert errors.count(line) == 1, errors


def test_the_first_rank_alone_listens_and_on_one_machine_on_its_loopback(interrupted):
    ((rank, kind, address),) = interrupted[2]
    assert (rank, kind) == (0, "tcp")
    assert address.startswith(LOOPBACK)


# ── Who is refused ──


def test_ranks_that_would_train_something_else_are_refused_by_name():
    found = results(
        """
        from torch import nn
        from tests.support.trained_models import arrays, network

        class Net(nn.Module):
            def __init__(self, shift=0.0):
                super().__init__()
                self.inner = network()
                self.register_buffer("shift", torch.tensor(shift))
            def forward(self, inputs):
                return self.inner(inputs) + self.shift

        def refusal(shift=0.0, seed=0, rate=1e-3, **settings):
            try:
                dt.Trainer(
                    Net(shift), nn.functional.cross_entropy, "adam", lr=rate, **settings
                ).fit(arrays(seed=seed))
            except DovetailError as error:
                return error.line
            return "trained"

        print(json.dumps([
            refusal(seed=rank), refusal(window=1 + rank), refusal(rate=1e-3 * (1 + rank)),
            refusal(shift=float(rank)), refusal(rule=["agn", "downpour"][rank]),
            refusal(workers=2 + rank), refusal(rule="hogwild"),
        ]))
        """
    )
    assert found[0] == found[1]
    names = ["dataset", "window", "optimizer", "buffers", "rule", "workers", "rule"]
    assert [line.partition(":")[0] for line in found[0]] == names
    assert all("rank 1 on host" in line for line in found[0][:-1])
    assert "has 2, and rank 0 has 1; start all ranks alike" in found[0][1]


@pytest.fixture(scope="module")
def failed():
    """The errors of two runs, on each rank: (class, text, line)."""
    return results(
        """
        errors = []
        def attempt(assignment, **options):
            try:
                load_backend("ranks", **options)(assignment, Watcher())
            except DovetailError as error:
                errors.append([type(error).__name__, getattr(error, "traceback", ""), error.line])
        attempt(assign(), listen="192.0.2.1")
        attempt(assign(learner=lambda worker: Sitting("raise", 2 if worker else 10**9)))
        print(json.dumps(errors))
        """
    )


def test_where_the_first_rank_cannot_listen_all_ranks_say_so(failed):
    first, second = (rank[0] for rank in failed)
    assert first[0] == "UsageError"
    assert first[2].startswith("listen: rank 0 cannot listen on '192.0.2.1': ")
    assert second[0] == "RankLostError"
    assert "cannot listen on '192.0.2.1'" in second[2]


def test_a_worker_that_raises_ends_the_run_with_its_traceback(failed):
    first, second = (rank[1] for rank in failed)
    assert first[0] == "ProcessError"
    assert "Traceback" in first[1]
    assert first[2].startswith("process worker 1 on rank 1 failed: ValueError: the data are gone")
    assert second[0] == "RankLostError"
    assert "the data are gone" in second[2]


def test_the_backend_is_chosen_by_how_the_process_was_started(monkeypatch):
    def backend(**settings):
        return TrainRequest(
            network(), torch.nn.functional.cross_entropy, "adam", **settings
        ).backend

    assert backend() == "processes"
    with pytest.raises(UsageError, match="ranks needs several ranks, which torchrun"):
        backend(backend="ranks")
    places = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    for name, value in places.items():
        monkeypatch.setenv(name, value)
    assert backend() == backend(backend="ranks") == "ranks"
    with pytest.raises(UsageError, match="threads does not join the 2 ranks that were started"):
        backend(backend="threads")
    monkeypatch.delenv("RANK")
    with pytest.raises(UsageError, match="RANK is not set"):
        backend()


# ── Who is let in ──


def frame_of(head, body=b""):
    checksum = connections.xxhash.xxh3_64(head + body).intdigest()
    return connections._HEAD.pack(b"DVR1", len(head), len(body), checksum) + head + body


HELLO = frame_of(b'["rank",{"rank":1}]')


@pytest.fixture
def door():
    opened = Door("127.0.0.1", TOKEN)
    yield opened
    opened.close()


def connect_as_stranger(door, nonce=b"n" * 32):
    """A connection over which the door has said its own nonce and proof, which are returned."""
    stranger = socket.create_connection(door.address, 5)
    stranger.sendall(nonce)
    heard = b""
    while len(heard) < 64:
        heard += stranger.recv(64)
    return stranger, heard[:32], heard[32:]


def is_closed(stranger):
    """Waits until the other end says something, or has closed."""
    try:
        return stranger.recv(1) == b""
    except ConnectionResetError:  # it has not read all that was sent
        return True


def test_who_does_not_know_the_token_is_let_go_before_a_frame_is_read(door):
    stranger, _, _ = connect_as_stranger(door)
    with stranger:
        stranger.sendall(b"x" * 32 + HELLO)
        assert is_closed(stranger)
    assert door.next(0.2) is None
    with pytest.raises(ConnectionError, match="does not know the run's token"):
        connect(door.address, b"u" * 32)
    own = connect(door.address, TOKEN)
    own.send("rank", {"rank": 1})
    _, kind, content = door.next(30)
    assert (kind, content) == ("rank", {"rank": 1})
    own.close()


def test_a_proof_is_of_one_connection_and_one_direction(door):
    nonce = b"n" * 32
    stranger, own, theirs = connect_as_stranger(door, nonce)
    honest = hmac.digest(TOKEN, b"rank k" + nonce + own, "sha256")
    with stranger:
        stranger.sendall(theirs + HELLO)
        assert is_closed(stranger)
    stranger, _, _ = connect_as_stranger(door, nonce)
    with stranger:
        stranger.sendall(honest + HELLO)
        assert is_closed(stranger)
    assert door.next(0.2) is None


def test_who_says_nothing_is_let_go(door, monkeypatch):
    monkeypatch.setattr(connections, "HANDSHAKE_SECONDS", 0.2)
    with socket.create_connection(door.address, 30) as stranger:
        stranger.sendall(b"short")
        assert is_closed(stranger)


@pytest.mark.parametrize(
    "frame",
    [
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        frame_of(b'["rank",{}]' + b" " * connections.HEAD_BYTES),
        frame_of(b'["rank",{}]', b"body"),
        HELLO.replace(b":1", b":2"),
    ],
    ids=["of another protocol", "with a long head", "with a body", "changed"],
)
def test_a_frame_that_is_none_ends_the_connection(door, frame):
    own = connect(door.address, TOKEN)
    own._socket.sendall(frame)
    with pytest.raises(ConnectionError, match=r"closed|broke"):
        own.receive(deadline=time.monotonic() + 20)
    assert door.next(0.2) is None
    own.close()


def test_silent_strangers_keep_nobody_out(door):
    strangers = [
        socket.create_connection(door.address) for _ in range(connections._MOST_HANDSHAKES + 3)
    ]
    own = connect(door.address, TOKEN)
    own.send("rank", {"rank": 1})
    came = door.next(20)
    assert came is not None and came[1:] == ("rank", {"rank": 1})
    for each in (*strangers, own, came[0]):
        each.close()


def test_what_takes_long_to_come_is_no_silence():
    ours, theirs = (connections.Connection(end) for end in socket.socketpair())
    before = theirs.heard
    # Half of a frame, whose other half does not come.
    ours._socket.sendall(frame_of(b'["reply",{}]', b"body")[: connections._HEAD.size])
    with pytest.raises(ConnectionError, match="said nothing"):
        theirs.receive(4, deadline=time.monotonic() + 0.5)
    assert theirs.heard > before
    ours.close()
    theirs.close()


@pytest.mark.parametrize("listen", ["0.0.0.0", "::", 5])
def test_an_address_that_is_none_of_one_interface_is_refused(listen):
    with pytest.raises(UsageError, match="give one address of this machine"):
        RanksOptions.of({"listen": listen})


def test_no_more_is_read_than_was_agreed_and_nothing_but_json():
    ours, theirs = (connections.Connection(end) for end in socket.socketpair())
    vector = np.arange(5, dtype=np.float32)
    ours.send("reply", {"clock": np.int64(3)}, vector)
    kind, content, body = theirs.receive(20)
    assert (kind, content) == ("reply", {"clock": 3})
    assert body.view(np.float32).tolist() == vector.tolist()
    ours.send("reply", {}, vector)
    with pytest.raises(ConnectionError, match="no frame of ours"):
        theirs.receive(16)
    for head in (b"[" * 10_000, b"\x80\x05K\x01.", b"3", b'["a",3]', b"[3,{}]"):
        ours, theirs = (connections.Connection(end) for end in socket.socketpair())
        ours._socket.sendall(frame_of(head))
        with pytest.raises(ConnectionError, match="no frame of ours"):
            theirs.receive()
