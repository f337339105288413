"""`dt.Optimizer` in a program of several ranks."""

import json
import os
import signal
import socket
import textwrap

import numpy as np
import pytest

from dovetail.errors import UsageError
from dovetail.runtime.ranks import RankPlace
from dovetail.training.backends.ranks import connections
from dovetail.training.backends.ranks import meeting as meetings
from dovetail.training.backends.ranks.connections import Door, connect
from dovetail.training.backends.ranks.meeting import Meeting
from tests.support import forked
from tests.support.ending import gone
from tests.support.forked_ranks import ForkedRanks
from tests.support.own_loops import environment, program

RULES = ["adag-agn", "downpour", "aeasgd", "eamsgd", "easgd", "diloco", "hogwild", "one-shot"]


ON_TWO_HOSTS = (2, 1)
"""Three ranks, of which the last one is on another host."""


def run(body, ranks=2, hosts=None):
    with ForkedRanks(ranks, program(textwrap.dedent(body)), hosts) as started:
        return started.results()


@pytest.fixture(scope="module")
def trained():
    """What two ranks get by sync, by DDP, and by each other rule."""
    return run(f"""
        from dovetail.runtime.forking import start_fork_server
        if rank == 0:  # each rule has a parameter server of its own
            start_fork_server(("dovetail.training.backends.processes.server",))
        sgd = lambda network: torch.optim.SGD(groups(network), lr=0.1, momentum=0.9)
        torch.distributed.init_process_group("gloo")
        results = {{
            "ddp": with_ddp(rank), "sync": with_rule(rank, "sync"),
            "ddp sgd": with_ddp(rank, sgd), "sync sgd": with_rule(rank, "sync", sgd),
            "uneven": with_rule(rank, "sync", steps=4 + 2 * rank),
        }}
        for rule in {RULES}:
            results[rule] = with_rule(rank, rule, window=None if rule == "one-shot" else 2)
        torch.distributed.destroy_process_group()
        print(json.dumps(results))
    """)


@pytest.mark.parametrize("kind", ["", " sgd"])
def test_sync_gives_the_numbers_of_ddp(trained, kind):
    for result in trained:
        np.testing.assert_allclose(result["sync" + kind], result["ddp" + kind], rtol=1e-6)


@pytest.mark.parametrize("rule", [*RULES, "sync", "uneven"])
def test_all_ranks_end_with_the_center(trained, rule):
    first, second = (result[rule] for result in trained)
    assert first == second
    assert np.isfinite(first).all()


def test_the_first_round_of_averaging_is_the_mean_of_what_the_ranks_get_alone(averaged):
    first, second = averaged
    assert first["start"] == second["start"]
    expected = (np.array(first["alone"]) + np.array(second["alone"])) / 2
    for result in averaged:
        np.testing.assert_allclose(result["round"], expected, rtol=1e-5, atol=1e-7)


def test_a_look_at_the_center_changes_nothing_for_a_rule_that_keeps_what_a_rank_pulled(averaged):
    """Rank 1 makes no step meanwhile, so rank 0's numbers do not depend on who is faster."""
    assert averaged[0]["looks"] == averaged[0]["does not look"]


@pytest.fixture(scope="module")
def averaged():
    return run("""
        network = a_network(seed=rank)
        optimizer = dt.Optimizer(torch.optim.SGD(network.parameters(), lr=0.1), "averaging", 2)
        result = {"start": values(network)}
        train(network, optimizer, batches(rank, 2))
        result["round"] = values(network)
        optimizer.finish()
        alone = a_network()
        train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), batches(rank, 2))
        result["alone"] = values(alone)
        for look in (True, False):
            network = a_network()
            optimizer = dt.Optimizer(adamw(network), "adag", 2)
            train(network, optimizer, batches(rank, 1))
            with optimizer.at_center(together=True):
                pass
            if rank == 0:
                for inputs in batches(0):
                    train(network, optimizer, [inputs])
                    if look:
                        optimizer.center_state_dict(network)
            with optimizer.at_center(together=True):
                pass
            result["looks" if look else "does not look"] = values(network)
            optimizer.finish()
        print(json.dumps(result))
    """)


DYING = """
    network = a_network()
    optimizer = dt.Optimizer(adamw(network), RULE, 2)
    train(network, optimizer, batches(rank, 3))
    print(os.getpid(), [int(p) for p in open(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
                        .read().split()], flush=True)
    if rank == DEAD:
        os.kill(os.getpid(), signal.SIGKILL)
    train(network, optimizer, batches(rank, 20))
    optimizer.finish()
    print(json.dumps(values(network)))
"""


def dying(rule, dead, hosts=None):
    body = DYING.replace("RULE", repr(rule)).replace("DEAD", str(dead))
    with ForkedRanks(3, program(textwrap.dedent(body)), hosts) as started:
        return started.ends()


@pytest.mark.parametrize(
    ("rule", "dead", "hosts"),
    [
        ("sync", 1, None),
        ("adag-agn", 1, None),
        ("ssp", 1, None),
        ("sync", 2, ON_TWO_HOSTS),
        ("agn", 1, ON_TWO_HOSTS),
    ],
)
def test_a_rank_that_is_killed_leaves_the_others_to_go_on(rule, dead, hosts):
    ends = dying(rule, dead, hosts)
    assert ends.pop(dead)[0] == -signal.SIGKILL
    (status, first, _), (other_status, last, _) = ends
    assert (status, other_status) == (0, 0), ends
    assert json.loads(first.splitlines()[-1]) == json.loads(last.splitlines()[-1])


@pytest.mark.parametrize("hosts", [None, ON_TWO_HOSTS])
def test_without_rank_0_the_others_end_with_one_line_and_no_process_is_left(hosts):
    dead, *others = dying("agn", 0, hosts)
    for status, _, line in others:
        assert status == 1
        assert line.startswith("dovetail.errors.ServerLostError: the parameter server died")
    left = json.loads(dead[1].splitlines()[0].split(maxsplit=1)[1])
    assert len(left) == (1 if hosts is None else 2)  # the server, and the last rank's stand-in
    assert all(gone(process) for process in left)


ERRORS = """
    errors = []
    def attempt(function):
        try:
            function()
        except dt.DovetailError as error:
            errors.append(f"{type(error).__name__}: {error}")

    attempt(lambda: dt.Optimizer(adamw(a_network()), "agn", 2 + rank))
    wide = torch.nn.Linear(3, 2 + rank)
    attempt(lambda: dt.Optimizer(torch.optim.SGD(wide.parameters(), lr=0.1), "agn", 2))

    def loads_other_weights():
        network = a_network()
        optimizer = dt.Optimizer(adamw(network), "agn", 2)
        network.load_state_dict(a_network(seed=rank).state_dict())
        train(network, optimizer, batches(rank, 1))
    attempt(loads_other_weights)

    def differ(finishes):
        network = a_network()
        optimizer = dt.Optimizer(adamw(network), "agn", 2)
        train(network, optimizer, batches(rank, 1))
        if rank == finishes:
            optimizer.finish()
        else:
            with optimizer.at_center(together=True):
                pass
    attempt(lambda: differ(1))
    attempt(lambda: differ(0))

    def is_alone():
        if rank == 0:
            dt.Optimizer(adamw(a_network()), "agn", 2, timeout_seconds=2.0)
    attempt(is_alone)
    print(json.dumps(errors))
"""


@pytest.mark.parametrize("hosts", [None, (1, 1)])
def test_ranks_that_do_not_fit_end_with_one_line_each(hosts):
    first, second = run(ERRORS, hosts=hosts)
    assert first[0] == second[0] == "UsageError: window: rank 1 has 3, and rank 0 2"
    assert first[1] == second[1] == "UsageError: parameters: rank 1 has others than rank 0"
    assert first[2] == "TrainingError: rank 1 has ended while the other ranks wait for it"
    assert second[2].startswith("UsageError: parameters: those of rank 1 were changed since")
    finished = "rank 1 has finished, and others wait for it; all ranks must do the same"
    waits = "rank 1 waits for others, which have finished; all ranks must do the same"
    assert first[3] == second[3] == f"TrainingError: {finished}"
    assert first[4] == second[4] == f"TrainingError: {waits}"
    assert first[5] == "TrainingError: no optimizer of rank 1 within 2 s"


def test_it_runs_under_torchrun_and_leaves_nothing_behind(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        program(
            "from tests.support.named_memory import named_memory\n"
            "result = with_rule(rank, 'adag-agn', window=2)\n"
            "left = open(f'/proc/{os.getpid()}/task/{os.getpid()}/children').read().split()\n"
            f"open(f'{tmp_path}/{{rank}}.json', 'w').write(json.dumps([result, left]))\n"
            "assert not named_memory()\n"
            "print(rank)\n"
        )
    )
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    launcher = forked.start(command, cwd=tmp_path, env=environment())
    _, errors = launcher.communicate(timeout=240)
    assert launcher.returncode == 0, errors
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first[1] == []


def test_a_process_of_another_user_is_not_let_in(monkeypatch):
    token = b"t" * 32
    door = Door("", token)
    with monkeypatch.context() as patched, socket.socket(socket.AF_UNIX) as strange:
        patched.setattr(connections, "user_of", lambda _link: os.getuid() + 1)
        with pytest.raises(ConnectionError, match="another user's"):
            connect(door.address, token)
        strange.connect(f"\0{door.address}")
        assert strange.recv(1) == b""  # it was closed unread
    own = connect(door.address, token)
    own.send("rank", {"rank": 1})
    came = door.next(30)
    assert came[1:] == ("rank", {"rank": 1})
    for each in (own, came[0], door):
        each.close()


# ── On several hosts ──

SYNCHRONOUS = ["sync", "diloco", "easgd"]


@pytest.fixture(scope="module")
def spread():
    """What three ranks get, of which the last is on another host, and all on one host."""
    body = f"""
        from dovetail.runtime.forking import start_fork_server
        if rank == 0:
            servers = ("processes.server", "ranks.worker")
            start_fork_server([f"dovetail.training.backends.{{name}}" for name in servers])
        results = {{rule: with_rule(rank, rule, window=2) for rule in {SYNCHRONOUS}}}
        results["adag-agn"] = with_rule(rank, "adag-agn", window=2)
        network = a_network()
        with dt.Optimizer(adamw(network), "diloco", 2) as optimizer:
            train(network, optimizer, batches(rank, 3))
            own = values(network)
            with optimizer.at_center(together=True):
                results["center"] = values(network)
            results["is back"] = own == values(network) != results["center"]
        try:
            with_rule(rank, "hogwild")
        except dt.DovetailError as error:
            results["hogwild"] = error.line
        left = open(f"/proc/{{os.getpid()}}/task/{{os.getpid()}}/children").read().split()
        results["left"] = len(left)
        print(json.dumps(results))
    """
    return run(body, 3, ON_TWO_HOSTS), run(body, 3)


@pytest.mark.parametrize("rule", [*SYNCHRONOUS, "center"])
def test_ranks_on_two_hosts_get_the_numbers_of_one_host(spread, rule):
    on_two, on_one = spread
    assert on_two[0][rule] == on_two[1][rule] == on_two[2][rule] == on_one[0][rule]


def test_ranks_on_two_hosts_all_end_with_the_center(spread):
    first, second, third = (rank["adag-agn"] for rank in spread[0])
    assert first == second == third
    assert np.isfinite(first).all()


def test_ranks_on_two_hosts_have_their_own_parameters_back_and_leave_nothing_behind(spread):
    assert all(rank["is back"] for rank in spread[0])
    # The fork server of rank 0 stays.
    assert [rank["left"] for rank in spread[0]] == [1, 0, 0]


def test_rules_without_locks_are_refused_on_two_hosts_by_name(spread):
    for rank in spread[0]:
        assert rank["hogwild"] == "rule: hogwild needs memory that all workers share"
    assert all("hogwild" not in rank or not isinstance(rank["hogwild"], str) for rank in spread[1])


def test_ranks_on_one_host_open_no_port_and_others_one_until_all_are_there():
    body = """
        from tests.support.listening import _bound, _inodes
        from dovetail.training.backends.ranks import meeting

        def ports():
            mine = _inodes(os.getpid())
            return sorted({kind for kind, _, inode in _bound() if inode in mine})

        seen, gather = [], meeting.Team.gather
        def watched(*arguments):
            seen.append(ports())
            return gather(*arguments)
        meeting.Team.gather = watched
        optimizer = dt.Optimizer(adamw(a_network()), "agn", 2)
        seen.append(ports())
        optimizer.close()
        print(json.dumps(seen))
    """
    assert run(body) == [[["unix"], []], [[]]]
    assert run(body, hosts=(1, 1)) == [[["tcp", "unix"], []], [[]]]


def test_a_rank_that_is_elsewhere_without_its_launchers_word_is_told_so():
    place = RankPlace(1, 2, "", ("nowhere", 1))
    meeting = Meeting(place, "optimizer/0")
    store = {"optimizer/0": json.dumps({"addresses": ["dovetail-none"], "token": "00"})}
    told = type("Store", (), {"check": lambda *_: True, "get": lambda _, name: store[name]})()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(meetings, "_store", lambda *_: told)
        with pytest.raises(UsageError, match="rank 0 is not on this host, or has ended"):
            meeting.join({}, beside=True)
        with pytest.raises(UsageError, match="must set LOCAL_WORLD_SIZE and LOCAL_RANK"):
            meeting.join({})


def test_a_rank_whose_link_comes_late_is_waited_for():
    body = """
        from dovetail.training import ranks
        if rank == 2:
            soon = ranks.connect
            def late(*given):
                time.sleep(0.5)
                return soon(*given)
            ranks.connect = late
        print(json.dumps(with_rule(rank, "sync")))
    """
    first, *others = run(body, 3, (1, 1, 1))
    assert all(each == first for each in others)
