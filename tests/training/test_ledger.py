"""The ledger, driven through every interleaving that hypothesis can think of."""

import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dovetail.errors import UsageError
from dovetail.training.ledger import Leases, Ledger
from dovetail.training.positions import Positions
from dovetail.training.records import Commit, Job, Lease, Refusal, Reply, Turn, Verdict
from dovetail.training.rules import make_rule
from dovetail.training.steps import Answer, Apply, Combine, Forget, Read

RULES = {
    "downpour": make_rule("downpour"),
    "averaging": make_rule("averaging"),
    "ssp": make_rule("ssp", slack=1),
    "locked": make_rule("ssp", slack=0),
    "hogwild": make_rule("hogwild"),
}


def a_job(**fields):
    given = {"run": "r", "size": 1, "samples": 10, "epochs": 1, "batch": 2, "window": 1}
    return Job(**{**given, **fields})


def a_ledger(name="downpour", **fields):
    return Ledger(a_job(**fields), RULES[name])


def first(worker):
    return Turn(worker, lease=True, pull=True)


def a_commit(worker, lease, sequence=1, base=0, **fields):
    samples = lease.stop - lease.start
    given = {"samples": samples, "steps": 1, "rate": 0.5, "loss": 1.0}
    return Commit("r", worker, sequence, base, lease.number, **{**given, **fields})


def a_turn(worker, lease, sequence=1, base=0, **fields):
    return Turn(worker, a_commit(worker, lease, sequence, base, **fields), lease=True, pull=True)


def answers(steps):
    return {step.worker: step.reply for step in steps if isinstance(step, Answer)}


def kinds(steps):
    return [(type(step).__name__, getattr(step, "worker", None)) for step in steps]


class Client:
    """What a worker knows; `sent` until it is answered, then `last` for sending again."""

    def __init__(self, worker, sequence):
        self.worker = worker
        self.sequence = sequence
        self.lease = None
        self.clock = 0
        self.sent = first(worker)
        self.last = None

    def hear(self, reply):
        if self.sent.commit and reply.verdict in (Verdict.APPLIED, Verdict.DUPLICATE):
            self.sequence = self.sent.commit.sequence
        self.lease = reply.lease
        self.clock = reply.clock
        self.last, self.sent = self.sent, None

    def commits(self):
        self.sent = a_turn(self.worker, self.lease, self.sequence + 1, self.clock)
        return self.sent


class Runs(RuleBasedStateMachine):
    """A run whose workers come, commit, are lost, speak again, and whose server restarts."""

    @initialize(
        name=st.sampled_from(sorted(RULES)),
        samples=st.integers(1, 13),
        epochs=st.integers(1, 3),
        window=st.sampled_from([1, 2, None]),
        workers=st.integers(1, 3),
        come=st.integers(0, 4),
        partition=st.sampled_from(["leased", "fixed"]),
    )
    def begin(self, name, samples, epochs, window, workers, come, partition):
        self.job = a_job(
            samples=samples, epochs=epochs, window=window, workers=workers, partition=partition
        )
        self.ledger = Ledger(self.job, RULES[name])
        self.clients, self.zombies = {}, {}
        self.owned = {}  # (worker, lease number) -> positions, as they were answered
        self.committed, self.applied = [], set()
        self.clock = 0
        self.joined, self.windows, self.past = set(), {}, {}
        for worker in range(come):
            self.spawn(worker)

    def at_work(self):
        return [c for c in self.clients.values() if c.sent is None and c.lease is not None]

    def pending(self):
        return [c for c in self.clients.values() if c.sent is not None]

    def heard(self):
        return [c for c in self.clients.values() if c.sent is None and c.last.commit]

    def offer(self, client, refusal=None):
        turn = client.sent
        if client.worker not in self.windows:
            self.enter(client.worker)
        counts = turn.commit is not None and not (refusal or self.ledger.check(turn.commit))
        if self.ledger.rule.lock_free and counts:  # there is no step for it
            self.count(turn.commit)
            self.clock += 1
        self.execute(self.ledger.offer(turn, refusal), turn)

    def enter(self, worker):
        """The reference for SSP's clocks: who comes late starts level with the slowest."""
        level = min(self.windows.values(), default=0)
        if len(self.joined) < self.job.workers:
            level = 0
        self.windows[worker] = max(level, self.past.get(worker, 0))
        self.joined.add(worker)

    def execute(self, steps, turn=None):
        ruling = self.ledger.rule
        seen = []
        for step in steps:
            if isinstance(step, Apply):
                assert turn is not None and step.worker == turn.worker and not ruling.gathers
                assert step.staleness == self.clock - turn.commit.base_clock
                self.count(turn.commit)
                self.clock += 1
            elif isinstance(step, Combine):
                assert [a.worker for a in step.arrivals] == sorted(a.worker for a in step.arrivals)
                for arrival in step.arrivals:
                    self.count(self.clients[arrival.worker].sent.commit)
                    assert arrival.workers == len(step.arrivals)
                self.clock += 1
            elif isinstance(step, Answer):
                self.answer(step, seen)
            seen.append(step)

    def answer(self, step, seen):
        reply, worker = step.reply, step.worker
        client = self.clients[worker]
        sent = client.sent
        assert sent is not None, "nobody is answered twice"
        assert (Read(worker) in seen) == (sent.pull and not reply.done)
        assert reply.clock == self.clock
        assert (reply.lease is None) == reply.done
        if reply.lease is not None:
            if (worker, reply.lease.number) not in self.owned:
                self.check_share(worker, reply.lease)
            self.owned[worker, reply.lease.number] = reply.lease
            slack = self.ledger.rule.slack
            leased = self.job.partition == "leased"
            if slack is not None and reply.lease != client.lease and leased:
                assert self.windows[worker] - self.slowest() <= slack
        client.hear(reply)

    def check_share(self, worker, lease):
        """A new lease is of the worker's own share, or of an absent worker's if that is used up."""
        if self.job.partition == "leased":
            return
        positions = Positions(self.job)
        share = positions.pool_of(lease.start)
        assert share == positions.pool_of(lease.stop - 1)
        if share == worker:
            return
        assert share not in self.clients, "its owner is there"
        if worker < self.job.workers:
            own = set(range(*positions.pools[worker]))
            leases = [self.owned[key] for key in self.owned if key[0] == worker]
            # One that came late may hold a part of it, taken while its owner was away.
            leases += [c.lease for c in self.clients.values() if c.lease is not None]
            assert own <= {p for lease in leases for p in range(lease.start, lease.stop)} | set(
                self.committed
            )

    def slowest(self):
        return min(self.windows.values()) if len(self.joined) >= self.job.workers else 0

    def count(self, commit):
        lease = self.owned[commit.worker, commit.lease]
        self.committed += range(lease.start, lease.stop)
        assert (commit.worker, commit.sequence) not in self.applied
        self.applied.add((commit.worker, commit.sequence))
        self.windows[commit.worker] += 1

    @rule(worker=st.integers(0, 3))
    def spawn(self, worker):
        """A new process for a worker, also where the old one was not missed yet."""
        self.zombies.pop(worker, None)
        if worker not in self.windows:
            self.enter(worker)
        client = self.clients[worker] = Client(worker, self.ledger.join(worker))
        assert {s for w, s in self.applied if w == worker} == set(range(1, client.sequence + 1))
        self.offer(client)

    @precondition(lambda self: self.at_work())
    @rule(data=st.data())
    def commit(self, data):
        client = data.draw(st.sampled_from(self.at_work()))
        client.commits()
        self.offer(client)

    @precondition(lambda self: self.at_work())
    @rule(data=st.data(), refusal=st.sampled_from([Refusal.NOT_FINITE, Refusal.CHECKSUM]))
    def refuse(self, data, refusal):
        client = data.draw(st.sampled_from(self.at_work()))
        lease, sequence = client.lease, client.sequence
        client.commits()
        self.offer(client, refusal)
        assert (client.lease, client.sequence) == (lease, sequence)

    @precondition(lambda self: self.pending())
    @rule(data=st.data())
    def send_a_pending_turn_again(self, data):
        self.offer(data.draw(st.sampled_from(self.pending())))

    @precondition(lambda self: self.heard())
    @rule(data=st.data())
    def send_an_answered_turn_again(self, data):
        client = data.draw(st.sampled_from(self.heard()))
        lease, before = client.lease, list(self.committed)
        client.sent = client.last
        self.offer(client)
        if self.committed == before:  # else it had been refused, and was sent well now
            assert client.sent is not None or client.lease == lease

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def evict(self, data):
        client = self.clients.pop(data.draw(st.sampled_from(sorted(self.clients))))
        self.past[client.worker] = self.windows.pop(client.worker)
        steps = self.ledger.evict(client.worker)
        assert steps[0] == Forget(client.worker)
        if client.sent is None and client.lease is not None:
            self.zombies[client.worker] = client
        self.execute(steps)

    @precondition(lambda self: self.zombies)
    @rule(data=st.data())
    def a_zombie_commits(self, data):
        client = self.zombies.pop(data.draw(st.sampled_from(sorted(self.zombies))))
        before = list(self.committed)
        self.clients[client.worker] = client
        client.commits()
        assert self.ledger.check(client.sent.commit) is Refusal.LEASE
        self.offer(client)
        assert self.committed == before

    @rule()
    def restart(self):
        state = self.ledger.state()
        text = json.dumps(state)
        self.ledger = Ledger.restore(self.job, self.ledger.rule, json.loads(text))
        assert self.ledger.state() == state
        assert json.dumps(self.ledger.state()) == text

    @precondition(lambda self: hasattr(self, "ledger"))
    @invariant()
    def nothing_counts_twice_and_nobody_waits_for_nothing(self):
        assert len(self.committed) == len(set(self.committed)) == self.ledger.samples
        assert self.clock == self.ledger.clock
        total = self.job.samples * self.job.epochs
        assert self.ledger.done == (len(self.committed) == total)
        waiting = {c.worker for c in self.clients.values() if c.sent is not None}
        assert waiting == set(self.ledger.waiting)
        # With shares, those of workers that never came are nobody's.
        come = len(self.joined) >= self.job.workers
        if self.job.partition != "leased":
            come = self.joined >= set(range(self.job.workers))
        if waiting and come:
            assert waiting != set(self.clients), "all wait, so nobody can end it"

    def teardown(self):
        """Whatever happened: new workers train all that is left."""
        if not hasattr(self, "ledger"):
            return
        for worker in range(max(self.job.workers, 4)):
            if worker not in self.clients:
                self.spawn(worker)
        for _ in range(500):
            if self.ledger.done:
                break
            client = next(c for c in self.clients.values() if c.sent is None)
            client.commits()
            self.offer(client)
        assert sorted(self.committed) == list(range(self.job.samples * self.job.epochs))
        assert not self.ledger.waiting and not self.ledger.leases


TestRuns = Runs.TestCase
TestRuns.settings = settings(
    max_examples=120,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_workers_that_take_turns_have_a_staleness_of_one_less_than_their_number():
    for workers in (1, 2, 5):
        ledger = a_ledger(samples=200, workers=workers)
        leases = {w: answers(ledger.offer(first(w)))[w].lease for w in range(workers)}
        bases, staleness = dict.fromkeys(leases, 0), []
        for i in range(8 * workers):
            worker = i % workers
            turn = a_turn(worker, leases[worker], i // workers + 1, bases[worker])
            apply, read, answer = ledger.offer(turn)
            assert read == Read(worker)
            assert apply.workers == workers
            leases[worker], bases[worker] = answer.reply.lease, answer.reply.clock
            staleness.append(apply.staleness)
        assert staleness[:workers] == list(range(workers))
        assert set(staleness[workers:]) == {workers - 1}


def test_a_commit_is_applied_then_the_center_is_read_then_it_is_answered():
    ledger = a_ledger()
    lease = answers(ledger.offer(first(0)))[0].lease
    assert kinds(ledger.offer(a_turn(0, lease))) == [("Apply", 0), ("Read", 0), ("Answer", 0)]


def test_leases_follow_each_other_in_windows_and_end_with_the_epoch():
    ledger = a_ledger(samples=7, epochs=2, batch=2, window=2)
    spans, lease = [], answers(ledger.offer(first(0)))[0].lease
    while lease is not None:
        spans.append((lease.start, lease.stop))
        turn = a_turn(0, lease, len(spans), ledger.clock)
        reply = answers(ledger.offer(turn))[0]
        lease = reply.lease
    assert spans == [(0, 4), (4, 7), (7, 11), (11, 14)]
    assert reply.done and ledger.done and ledger.samples == 14


def test_without_a_window_each_worker_gets_an_equal_share_of_all_epochs():
    ledger = a_ledger("averaging", samples=7, epochs=3, window=None, workers=2)
    assert ledger.offer(first(0)) == []
    replies = answers(ledger.offer(first(1)))
    assert [(r.lease.start, r.lease.stop) for r in replies.values()] == [(0, 11), (11, 21)]
    ledger.offer(a_turn(0, replies[0].lease))
    steps = ledger.offer(a_turn(1, replies[1].lease))
    assert kinds(steps) == [("Combine", None), ("Answer", 0), ("Answer", 1)]
    assert [(a.worker, a.samples) for a in steps[0].arrivals] == [(0, 11), (1, 10)]
    assert all(reply.done for reply in answers(steps).values())


def test_a_stream_without_an_end_cannot_be_shared_out_at_once():
    with pytest.raises(UsageError) as caught:
        a_ledger(samples=None, window=None)
    assert caught.value.option == "window"


def test_a_dead_workers_samples_are_trained_by_the_next_that_asks():
    ledger = a_ledger(samples=6)
    mine = answers(ledger.offer(first(0)))[0].lease
    lost = answers(ledger.offer(first(1)))[1].lease
    assert ledger.evict(1) == [Forget(1)]
    inherited = answers(ledger.offer(a_turn(0, mine)))[0].lease
    assert (inherited.start, inherited.stop) == (lost.start, lost.stop)
    assert inherited.number != lost.number


def test_who_asks_when_nothing_is_free_waits_for_what_a_dead_worker_leaves():
    ledger = a_ledger(samples=2)
    lost = answers(ledger.offer(first(0)))[0].lease
    assert ledger.offer(first(1)) == []
    assert ledger.waiting == (1,)
    steps = ledger.evict(0)
    assert kinds(steps) == [("Forget", 0), ("Read", 1), ("Answer", 1)]
    inherited = answers(steps)[1].lease
    assert (inherited.start, inherited.stop) == (lost.start, lost.stop)
    assert answers(ledger.offer(a_turn(1, inherited)))[1].done


def test_all_that_wait_are_told_when_the_last_sample_is_committed():
    ledger = a_ledger(samples=2)
    lease = answers(ledger.offer(first(0)))[0].lease
    assert ledger.offer(first(2)) == ledger.offer(first(1)) == []
    replies = answers(ledger.offer(a_turn(0, lease)))
    assert {worker: reply.done for worker, reply in replies.items()} == {0: True, 1: True, 2: True}
    assert answers(ledger.offer(first(7)))[7].done  # and who comes later, at once


def test_a_lost_answer_is_given_again_with_the_same_lease():
    ledger = a_ledger()
    lease = answers(ledger.offer(first(0)))[0].lease
    turn = a_turn(0, lease)
    given = answers(ledger.offer(turn))[0]
    steps = ledger.offer(turn)
    assert kinds(steps) == [("Read", 0), ("Answer", 0)]
    assert answers(steps)[0] == replace(given, verdict=Verdict.DUPLICATE)
    assert (ledger.clock, ledger.samples) == (1, 2)


def test_every_reason_to_refuse_a_commit_changes_nothing():
    ledger = a_ledger()
    lease = answers(ledger.offer(first(0)))[0].lease
    good = a_commit(0, lease)
    bad = {
        Refusal.RUN: replace(good, run="another"),
        Refusal.LEASE: replace(good, lease=lease.number + 1),
        Refusal.SEQUENCE: replace(good, sequence=2),
    }
    for refusal, commit in bad.items():
        assert ledger.check(commit) is refusal
    assert ledger.check(replace(good, sequence=0)) is Refusal.SEQUENCE
    assert ledger.check(replace(good, worker=5)) is Refusal.LEASE
    found = {r: good for r in Refusal if r not in bad}  # by who looks at the vector
    for refusal, commit in {**bad, **found}.items():
        turn = Turn(0, commit, lease=True, pull=True)
        reply = answers(ledger.offer(turn, None if refusal in bad else refusal))[0]
        assert (reply.verdict, reply.refusal) == (Verdict.REFUSED, refusal)
        assert reply.lease == lease
        assert (ledger.clock, ledger.samples) == (0, 0)
    assert answers(ledger.offer(Turn(1, good, lease=True)))[1].refusal is Refusal.LEASE
    assert answers(ledger.offer(Turn(0, good)))[0] == Reply(Verdict.APPLIED, clock=1, samples=2)
    assert ledger.check(good) is Verdict.DUPLICATE


def test_a_silent_workers_late_commit_is_refused_and_it_goes_on():
    ledger = a_ledger()
    mine = answers(ledger.offer(first(0)))[0].lease
    ledger.evict(0)
    reply = answers(ledger.offer(a_turn(0, mine)))[0]
    assert (reply.verdict, reply.refusal) == (Verdict.REFUSED, Refusal.LEASE)
    assert (reply.lease.start, reply.lease.stop) == (mine.start, mine.stop)
    assert answers(ledger.offer(a_turn(0, reply.lease)))[0].verdict is Verdict.APPLIED


def test_a_round_waits_for_all_first_workers_and_answers_in_their_order():
    ledger = a_ledger("averaging", samples=20, workers=3)
    assert ledger.offer(first(2)) == ledger.offer(first(0)) == []
    replies = answers(ledger.offer(first(1)))
    assert [(w, r.lease.start) for w, r in replies.items()] == [(0, 0), (1, 2), (2, 4)]
    assert ledger.offer(a_turn(2, replies[2].lease)) == []
    assert ledger.offer(a_turn(0, replies[0].lease)) == []
    combine, *rest = ledger.offer(a_turn(1, replies[1].lease))
    assert [(a.worker, a.staleness, a.workers) for a in combine.arrivals] == [
        (0, 0, 3),
        (1, 0, 3),
        (2, 0, 3),
    ]
    assert kinds(rest) == [(kind, worker) for worker in range(3) for kind in ("Read", "Answer")]
    assert {r.clock for r in answers(rest).values()} == {1}


def test_a_round_is_complete_when_a_hung_worker_is_evicted():
    ledger = a_ledger("averaging", samples=20, workers=2)
    ledger.offer(first(0))
    replies = answers(ledger.offer(first(1)))
    assert ledger.offer(a_turn(0, replies[0].lease)) == []
    steps = ledger.evict(1)
    assert kinds(steps) == [("Forget", 1), ("Combine", None), ("Read", 0), ("Answer", 0)]
    assert [a.worker for a in steps[1].arrivals] == [0]
    lost = replies[1].lease
    assert (answers(steps)[0].lease.start, answers(steps)[0].lease.stop) == (lost.start, lost.stop)


def test_a_first_round_waits_for_workers_that_joined_but_have_not_asked_yet():
    ledger = a_ledger("averaging", samples=20, workers=2)
    ledger.join(0), ledger.join(1)
    assert ledger.offer(first(0)) == []
    assert set(answers(ledger.offer(first(1)))) == {0, 1}


def test_what_a_dead_worker_had_staged_for_a_round_is_trained_again():
    ledger = a_ledger("averaging", samples=4, workers=2)
    ledger.offer(first(0))
    replies = answers(ledger.offer(first(1)))
    ledger.offer(a_turn(0, replies[0].lease))
    ledger.evict(0)
    steps = ledger.offer(a_turn(1, replies[1].lease))
    assert [a.worker for a in steps[0].arrivals] == [1]
    assert answers(steps)[1].lease.start == replies[0].lease.start


def test_who_joins_during_a_round_begins_with_the_next():
    ledger = a_ledger("averaging", samples=20)
    lease = answers(ledger.offer(first(0)))[0].lease
    assert ledger.offer(first(4)) == []
    assert set(answers(ledger.offer(a_turn(0, lease)))) == {0, 4}


def test_a_round_that_never_began_begins_without_a_worker_that_was_lost():
    ledger = a_ledger("averaging", samples=20, workers=2)
    assert ledger.offer(first(0)) == []
    assert set(answers(ledger.evict(1))) == {0}


def test_slack_holds_the_fast_until_the_slowest_has_caught_up():
    ledger = a_ledger("ssp", samples=40, workers=2)
    leases = {w: answers(ledger.offer(first(w)))[w].lease for w in (0, 1)}
    lease = answers(ledger.offer(a_turn(0, leases[0], 1)))[0].lease  # one ahead: allowed
    assert kinds(ledger.offer(a_turn(0, lease, 2))) == [("Apply", 0)]  # two ahead: waits
    steps = ledger.offer(a_turn(1, leases[1], 1))
    assert kinds(steps)[0] == ("Apply", 1)
    assert set(answers(steps)) == {0, 1}
    assert answers(steps)[0].clock == 3  # it reads what the slowest has just committed


def test_slack_waits_for_workers_that_have_not_come_yet_unless_they_are_given_up():
    ledger = a_ledger("ssp", samples=40, workers=2)
    lease = answers(ledger.offer(first(0)))[0].lease
    lease = answers(ledger.offer(a_turn(0, lease, 1)))[0].lease
    assert answers(ledger.offer(a_turn(0, lease, 2))) == {}
    assert set(answers(ledger.evict(1))) == {0}


def test_who_joins_late_starts_level_with_the_slowest():
    ledger = a_ledger("ssp", samples=40, workers=1)
    lease = answers(ledger.offer(first(0)))[0].lease
    for sequence in range(1, 6):
        lease = answers(ledger.offer(a_turn(0, lease, sequence)))[0].lease
    ledger.join(1)
    assert 0 in answers(ledger.offer(a_turn(0, lease, 6)))


def test_who_comes_back_after_a_long_silence_is_level_with_the_slowest():
    ledger = a_ledger("ssp", samples=40, workers=2)
    lease = answers(ledger.offer(first(0)))[0].lease
    ledger.offer(first(1))
    ledger.evict(1)
    for sequence in range(1, 6):
        lease = answers(ledger.offer(a_turn(0, lease, sequence)))[0].lease
    ledger.offer(first(1))
    assert 0 in answers(ledger.offer(a_turn(0, lease, 6)))


def test_a_worker_that_starts_anew_keeps_its_lease_but_not_its_unanswered_turn():
    ledger = a_ledger("averaging", samples=40, workers=2)
    ledger.offer(first(0))
    lease = answers(ledger.offer(first(1)))[1].lease
    ledger.offer(a_turn(1, lease))
    assert ledger.waiting == (1,)
    assert ledger.join(1) == 0
    assert ledger.waiting == ()
    assert answers(ledger.offer(first(1)))[1].lease == lease


def test_lock_free_commits_count_without_a_step():
    ledger = a_ledger("hogwild")
    lease = answers(ledger.offer(first(0)))[0].lease
    turn = a_turn(0, lease, base=0)
    assert ledger.staleness(turn.commit) == 0
    assert kinds(ledger.offer(turn)) == [("Read", 0), ("Answer", 0)]
    assert (ledger.clock, ledger.samples) == (1, 2)
    assert ledger.staleness(turn.commit) == 1


def test_a_stop_answers_all_and_nothing_counts_after_it():
    ledger = a_ledger("averaging", samples=20, workers=2)
    ledger.offer(first(0))
    replies = answers(ledger.offer(first(1)))
    ledger.offer(a_turn(0, replies[0].lease))
    assert ledger.stop() == [Answer(0, Reply(stop=True))]
    assert ledger.offer(a_turn(1, replies[1].lease)) == [Answer(1, Reply(stop=True))]
    assert ledger.samples == 0


def test_slow_workers_get_fewer_steps_where_the_rule_is_dynamic():
    ledger = Ledger(a_job(samples=400, window=8, workers=2), make_rule("async-diloco"))
    leases = {w: answers(ledger.offer(first(w)))[w].lease for w in (0, 1)}
    for sequence in (1, 2):
        for worker, seconds in ((0, 1.0), (1, 4.0)):
            steps = (leases[worker].stop - leases[worker].start) // 2
            times = {"steps": steps, "end_seconds": seconds * steps}
            turn = a_turn(worker, leases[worker], sequence, **times)
            leases[worker] = answers(ledger.offer(turn))[worker].lease
    assert [lease.stop - lease.start for lease in leases.values()] == [16, 4]


def test_workers_count_on_where_a_restored_server_has_forgotten_their_last_commits():
    ledger = a_ledger(samples=40)
    lease = answers(ledger.offer(first(0)))[0].lease
    before = ledger.state()
    for sequence in (1, 2, 3):
        lease = answers(ledger.offer(a_turn(0, lease, sequence)))[0].lease
    ledger = Ledger.restore(ledger.job, ledger.rule, before)
    reply = answers(ledger.offer(a_turn(0, lease, 4)))[0]
    assert reply.refusal is Refusal.LEASE
    turn = a_turn(0, reply.lease, 4)
    assert answers(ledger.offer(turn))[0].verdict is Verdict.APPLIED
    assert ledger.samples == 2
    assert ledger.check(replace(turn.commit, sequence=6, lease=1)) is Refusal.SEQUENCE


def test_workers_count_on_after_each_restart_also_those_whose_commits_were_replayed():
    """A log that has lost its end with the machine lacks the last commits of a worker."""
    ledger = a_ledger(samples=40)
    state = ledger.state()
    ledger = Ledger.restore(ledger.job, ledger.rule, state)
    lease = answers(ledger.offer(first(0)))[0].lease
    lease = answers(ledger.offer(a_turn(0, lease, 1)))[0].lease
    ledger.restart(1000)
    reply = answers(ledger.offer(a_turn(0, lease, 4)))[0]
    assert (reply.verdict, reply.lease.number) == (Verdict.APPLIED, 1000)
    assert ledger.check(a_turn(0, reply.lease, 6).commit) is Refusal.SEQUENCE


def test_a_commit_that_waited_when_the_log_was_lost_is_not_the_first_that_counts_after_it():
    """It had counted before, and so had those behind it, which the log has lost."""
    ledger = a_ledger("averaging", samples=40, workers=2)
    ledger.offer(first(0))
    leases = {w: reply.lease for w, reply in answers(ledger.offer(first(1))).items()}
    ledger.offer(a_turn(1, leases[1], 1))
    ledger.restart(1000)
    leases = answers(ledger.offer(a_turn(0, leases[0], 4)))
    assert leases[1].verdict is Verdict.APPLIED
    assert ledger.check(a_turn(1, leases[1].lease, 3).commit) is None
    ledger.offer(a_turn(1, leases[1].lease, 3))
    leases = answers(ledger.offer(a_turn(0, leases[0].lease, 5)))
    assert ledger.check(a_turn(1, leases[1].lease, 5).commit) is Refusal.SEQUENCE


@pytest.mark.parametrize("length", [0, 1, 5, 6, 9])
def test_a_stream_ends_where_its_commits_say_and_every_sample_counted(length):
    ledger = a_ledger(samples=None, epochs=1)
    leases = {w: answers(ledger.offer(first(w)))[w].lease for w in range(3)}
    sequence, done = dict.fromkeys(leases, 0), set()
    while done != set(leases):
        worker = next(w for w in leases if w not in done and w not in ledger.waiting)
        lease, there = leases[worker], max(0, min(length, leases[worker].stop))
        samples = max(0, there - lease.start)
        sequence[worker] += 1
        fields = {"samples": samples, "steps": int(samples > 0)}
        steps = ledger.offer(a_turn(worker, lease, sequence[worker], **fields))
        assert any(isinstance(step, Apply) for step in steps) == (samples > 0)
        for other, reply in answers(steps).items():
            leases[other] = reply.lease
            done |= {other} if reply.done else set()
    assert ledger.samples == length


def test_what_was_lost_first_in_the_data_is_handed_out_first():
    ledger = a_ledger(samples=20)
    leases = [answers(ledger.offer(first(worker)))[worker].lease for worker in range(4)]
    for worker in (2, 0, 1):
        ledger.evict(worker)
    again = [answers(ledger.offer(first(worker)))[worker].lease for worker in (4, 5, 6, 7)]
    assert [(a.start, a.stop) for a in again] == [
        (0, 2),
        (2, 4),
        (4, 6),
        (leases[3].stop, leases[3].stop + 2),
    ]


def test_of_a_lost_lease_that_is_longer_than_a_window_the_rest_stays_free():
    leases = Leases(a_job(samples=20))
    long, after = leases.take(4), leases.take(1)
    leases.give_back(long)
    spans = [(lease.start, lease.stop) for lease in (leases.take(1), leases.take(2), leases.take())]
    assert spans == [(0, 2), (2, 6), (6, 8)]
    assert leases.take().start == after.stop


def test_leases_beyond_a_streams_end_are_nobodys():
    leases = Leases(a_job(samples=None))
    first, lost, cut, void, late = (leases.take() for _ in range(5))
    leases.give_back(lost)
    leases.give_back(void)
    leases.end(5)
    leases.end(6)  # who met the end at an earlier position knows better
    leases.give_back(late)
    assert leases.complete(first, 2) == 2
    again = leases.take()
    assert (again.start, again.stop) == (lost.start, lost.stop)
    leases.complete(again, 2)
    assert not leases.finished
    leases.give_back(cut)
    rest = leases.take()
    assert (rest.start, rest.stop) == (4, 5)
    leases.complete(rest, 1)
    assert leases.finished and leases.take() is None and leases.committed == 5


def test_a_stream_is_done_though_a_lease_beyond_its_end_is_still_held():
    leases = Leases(a_job(samples=None))
    first, _beyond = leases.take(), leases.take()
    leases.complete(first, 1)
    assert leases.finished


def test_the_end_of_a_stream_needs_no_timeout():
    ledger = a_ledger(samples=None)
    lease = answers(ledger.offer(first(0)))[0].lease
    ledger.end_stream(2)
    assert ledger.offer(first(1)) == []
    assert not ledger.done
    replies = answers(ledger.offer(a_turn(0, lease)))
    assert {w: r.done for w, r in replies.items()} == {0: True, 1: True}


def test_an_empty_run_is_done_at_once():
    assert answers(a_ledger(epochs=0).offer(first(0)))[0] == Reply(done=True)
    assert Lease(0, 0, 2) == answers(a_ledger().offer(first(0)))[0].lease


def shares_of(ledger, workers):
    """Worker -> the leases that it gets if all take turns, until nobody gets any."""
    spans = {worker: [] for worker in range(workers)}
    replies = {w: answers(ledger.offer(first(w)))[w] for w in range(workers)}
    while replies:
        worker, reply = next(iter(replies.items()))
        del replies[worker]
        if reply.lease is None:
            continue
        spans[worker].append((reply.lease.start, reply.lease.stop))
        turn = a_turn(worker, reply.lease, len(spans[worker]), ledger.clock)
        replies |= answers(ledger.offer(turn))
    return spans


def test_each_worker_leases_from_its_share_whose_windows_cross_the_epochs():
    ledger = a_ledger(samples=7, epochs=2, batch=2, window=3, workers=2, partition="fixed")
    # Shares of 3 and 4 samples: steps of 2 + 1 + 2 + 1, and of 2 + 2 + 2 + 2.
    assert shares_of(ledger, 2) == {0: [(0, 5), (5, 6)], 1: [(6, 12), (12, 14)]}
    assert ledger.done and ledger.samples == 14


def test_without_a_window_a_worker_leases_its_whole_share():
    ledger = a_ledger("averaging", samples=7, epochs=3, window=None, workers=2, partition="fixed")
    ledger.offer(first(0))
    replies = answers(ledger.offer(first(1)))
    assert [(r.lease.start, r.lease.stop) for r in replies.values()] == [(0, 9), (9, 21)]


def test_a_lost_workers_share_waits_until_others_have_finished_theirs():
    ledger = a_ledger(samples=8, batch=2, workers=2, partition="fixed")
    leases = [answers(ledger.offer(first(worker)))[worker].lease for worker in range(2)]
    ledger.evict(1)
    second = answers(ledger.offer(a_turn(0, leases[0])))[0].lease
    assert (second.start, second.stop) == (2, 4)  # its own
    third = answers(ledger.offer(a_turn(0, second, 2)))[0].lease
    assert (third.start, third.stop) == (4, 6)  # the lost worker's
    back = answers(ledger.offer(first(1)))[1].lease
    assert (back.start, back.stop) == (6, 8)  # it came back and goes on with what is left
    assert answers(ledger.offer(a_turn(0, third, 3))) == {}  # nothing is left for the other
    assert not ledger.done
    assert all(r.done for r in answers(ledger.offer(a_turn(1, back))).values()) and ledger.done


def test_a_worker_that_has_finished_a_small_share_holds_nobody_up():
    """Shares of 2 and 3 samples are 1 and 2 windows an epoch, and the slack is 1."""
    job = {"samples": 5, "epochs": 9, "batch": 2, "workers": 2, "partition": "fixed"}
    ledger = a_ledger("ssp", **job)
    shares_of(ledger, 2)
    assert ledger.done


def test_a_state_from_before_there_were_shares_is_restored():
    ledger = a_ledger()
    ledger.offer(first(0))
    state = ledger.state()
    (state["leases"]["next"],) = state["leases"]["next"]
    assert Ledger.restore(ledger.job, ledger.rule, state).state() == ledger.state()


def test_a_stream_has_no_shares():
    with pytest.raises(UsageError, match="stream of unknown length"):
        a_ledger(samples=None, partition="fixed")


@pytest.mark.parametrize(("partition", "workers"), [("leased", 5), ("fixed", 3)])
def test_a_run_that_is_given_more_epochs_trains_each_sample_of_each_once(partition, workers):
    """Half-way through, while leases are held and one came back from a dead worker."""
    job = Job("r", 1, 23, 2, 2, 3, workers=3, partition=partition)
    ledger, trained = Ledger(job, make_rule("downpour")), []
    leases, sequences = {}, {}

    def ask(worker, commit):
        lease = leases.pop(worker, None) if commit else None
        sent = None
        if lease is not None:
            sequences[worker] = sequences.get(worker, 0) + 1
            count = lease.stop - lease.start
            sent = Commit("r", worker, sequences[worker], 0, lease.number, count, 1, 0.1, 1.0)
            positions = Positions(ledger.job)
            for start, stop in positions.batches(lease.start, lease.stop):
                at = positions.stretch(start)
                order = positions.order(at)
                trained.extend(
                    (at.epoch, int(s)) for s in order[start - at.start : stop - at.start]
                )
        for step in ledger.offer(Turn(worker, sent, lease=True)):
            if isinstance(step, Answer) and step.reply.lease is not None:
                leases[step.worker] = step.reply.lease

    for worker in (0, 1, 2, 0, 1, 0):
        ask(worker, commit=True)
    ledger.evict(2)
    leases.pop(2)
    ledger.change(4, workers)
    restored = Ledger.restore(job, ledger.rule, json.loads(json.dumps(ledger.state())))
    assert restored.state() == ledger.state()
    assert restored.job == replace(job, epochs=4, workers=workers)
    late = Commit("r", 0, sequences[0] + 1, 0, leases[0].number, 6, 1, 0.1, 1.0)
    assert ledger.check(late) is Refusal.LEASE
    leases.clear()
    sequences.clear()
    for _ in range(100):
        for worker in range(workers):
            ask(worker, commit=True)
    assert ledger.done and ledger.samples == 4 * 23
    assert sorted(trained) == [(epoch, sample) for epoch in range(4) for sample in range(23)]
