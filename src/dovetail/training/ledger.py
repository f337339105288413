"""Turns workers' turns into steps: a state machine that counts leases, commits and rounds.

    free ──take──► held ──commit──► committed          samples, as leases
              ◄──evict──

The ledger knows neither vectors nor time. Its clock is the number of commits applied so far, or of
rounds for a rule that gathers. A commit's staleness is the clock just before it is applied, minus
the clock at which its parameters were read. So n workers that take turns have staleness n - 1, and
one worker alone has 0.

* A commit counts if its worker holds its lease. It counts once: a commit whose number is not above
  the worker's last one is a duplicate.
* Rules that gather hand out leases at the start of a round, to all workers that ask, in the order
  of their numbers. A round is complete when all workers that still hold a lease have committed.
* Stale synchronous parallel: a worker's lease waits while it is more than `slack` windows ahead of
  the slowest (Q. Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel
  Parameter Server", 2013, https://papers.nips.cc/paper/4894, section 2). Differences: a worker's
  clock counts its leases, and a worker that joins late starts level with the slowest.
* A worker that asks for samples when none is free waits, because it may get a dead worker's. All
  that wait are answered when the last sample is committed.
* If each worker has a share of the samples (`positions`), its leases come from its share. While a
  worker is absent (it died and its replacement has not joined, or it is silent, or lost for good),
  others that have finished their own shares lease from its share, one window at a time. If it comes
  back, it goes on with what is left. So each sample of each epoch still counts exactly once.

The same calls give the same steps, so a log of the calls is enough to continue after a server died.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from dovetail.errors import UsageError
from dovetail.training.positions import Positions
from dovetail.training.records import (
    CHANGING,
    LEASED,
    Commit,
    Job,
    Lease,
    Refusal,
    Reply,
    Turn,
    Verdict,
)
from dovetail.training.rules.contract import Rule
from dovetail.training.steps import Answer, Apply, Combine, Forget, Read, Step


@dataclass
class _LedgerWorker:
    """A worker, from its first turn on.

    sequence   number of its last commit that counted
    windows    windows that it committed: its clock for `slack`
    speed      local steps per second in its last window; 0: not known yet
    present    false once it was evicted or has left, until it speaks again
    """

    sequence: int = 0
    lease: Lease | None = None
    windows: int = 0
    speed: float = 0.0
    present: bool = True


@dataclass
class _WaitingTurn:
    """A turn that is not answered yet. `staged`: its commit waits for the round to be complete."""

    turn: Turn
    verdict: Verdict | None = None
    refusal: Refusal | None = None
    staged: bool = False


class Ledger:
    """Which samples are handed out and committed, and which turns wait for an answer.

    clock     commits applied so far, or rounds
    stopped   whether the run was ended before its epochs
    """

    def __init__(self, job: Job, rule: Rule) -> None:
        self.job = job
        self.rule = rule
        self.clock = 0
        self.stopped = False
        self._started = False  # all first workers have asked: rules that gather may begin
        self._leases = Leases(job)
        self._members: dict[int, _LedgerWorker] = {}
        self._waiting: dict[int, _WaitingTurn] = {}  # in the order of asking
        # A server that took over may lack the last commits, so workers may skip numbers.
        self._restored = False
        self._heard: set[int] = set()  # workers whose later commits have counted since then
        # Worker -> number of the commit that waited then: it may have counted before, and been lost
        # with those that followed it.
        self._waited: dict[int, int] = {}

    @property
    def samples(self) -> int:
        """Samples that were committed so far."""
        return self._leases.committed

    @property
    def done(self) -> bool:
        """Whether all samples of all epochs are committed."""
        return self._leases.finished

    @property
    def leases(self) -> dict[int, Lease]:
        """Worker -> the lease that it holds now, whether its commit is staged or not."""
        members = sorted(self._members.items())
        return {worker: member.lease for worker, member in members if member.lease is not None}

    @property
    def waiting(self) -> tuple[int, ...]:
        """Workers whose turn is not answered yet. They are silent without being hung."""
        return tuple(self._waiting)

    def staleness(self, commit: Commit) -> int:
        """The staleness of `commit` if it is applied now."""
        return max(0, self.clock - max(0, commit.base_clock))

    def join(self, worker: int) -> int:
        """Notes that the worker has started and returns the number of its last commit that counted,
        from which it continues. It takes the place of an earlier worker of its number: it keeps
        that one's lease, and that one's unanswered turn is dropped."""
        self._waiting.pop(worker, None)
        return self._welcome(worker).sequence

    def check(self, commit: Commit) -> Refusal | Verdict | None:
        """Returns None if the commit would count, Verdict.DUPLICATE if it has counted already, else
        the reason why it would not."""
        if commit.run != self.job.run:
            return Refusal.RUN
        # A worker that has never asked for anything holds no lease, so its commit is refused.
        member = self._members.get(commit.worker, _LedgerWorker())
        if 0 < commit.sequence <= member.sequence:
            return Verdict.DUPLICATE
        if member.lease is None or member.lease.number != commit.lease:
            return Refusal.LEASE
        is_next = commit.sequence == member.sequence + 1
        may_skip = self._restored and commit.worker not in self._heard
        skips = may_skip and commit.sequence > member.sequence
        return None if is_next or skips else Refusal.SEQUENCE

    def offer(self, turn: Turn, refusal: Refusal | None = None) -> list[Step]:
        """Takes a turn and returns the steps that follow. `refusal` is what the caller found wrong
        with the commit's vector.

        A turn that is offered again, because its answer was lost, is answered again."""
        self._welcome(turn.worker)
        waiting = _WaitingTurn(turn)
        steps: list[Step] = []
        commit = turn.commit
        if commit is not None and not self.stopped:
            objection = refusal or self.check(commit)
            # A worker cannot commit in another worker's name.
            if commit.worker != turn.worker:
                objection = Refusal.LEASE
            if isinstance(objection, Refusal):
                waiting.verdict, waiting.refusal = Verdict.REFUSED, objection
            elif objection is not None:
                waiting.verdict = objection
            elif self.rule.gathers:
                waiting.staged = True
            else:
                steps += self._apply(commit)
                waiting.verdict = Verdict.APPLIED
        self._waiting[turn.worker] = waiting
        return steps + self._settle()

    def evict(self, worker: int) -> list[Step]:
        """Notes that the worker is dead or hung: its lease is free again, and its staged commit is
        dropped. If it speaks again, its turn is taken, but the old lease's commit is refused."""
        member = self._members.setdefault(worker, _LedgerWorker())
        member.present = False
        self._waiting.pop(worker, None)
        if member.lease is not None:
            self._leases.give_back(member.lease)
            member.lease = None
        return [Forget(worker), *self._settle()]

    def leave(self, worker: int) -> list[Step]:
        """Notes that the worker has ended, so that no round waits for it any more. That is all that
        an eviction does to a worker without a lease."""
        return self.evict(worker)

    def end_stream(self, samples: int) -> list[Step]:
        """Notes that the stream ends after so many samples. (A commit of fewer samples than its
        lease has says the same.)"""
        self._leases.end(samples)
        return self._settle()

    def change(self, epochs: int, workers: int) -> list[Step]:
        """Goes on with more epochs, or with another number of workers. All workers are new then:
        none is known or holds a lease any more, and what they held is free again."""
        forgotten: list[Step] = [Forget(worker) for worker in self._members]
        for lease in self.leases.values():
            self._leases.give_back(lease)
        self._members.clear()
        self._waiting.clear()
        self._started = False
        self.job = replace(self.job, epochs=epochs, workers=workers)
        self._leases.change(self.job)
        return forgotten

    def restart(self, leases: int | None) -> None:
        """Notes that another server has taken over, which may lack the last inputs of the one
        before. It numbers the leases that are taken from now on from `leases`; None: it goes on.

        Its workers have counted commits that may be lost. So the first commit of each worker may
        skip the numbers that are missing here."""
        self._restored = True
        self._heard.clear()
        self._waited = {
            worker: waiting.turn.commit.sequence
            for worker, waiting in self._waiting.items()
            if waiting.turn.commit is not None
        }
        if leases is not None:
            self._leases.number = leases

    def stop(self) -> list[Step]:
        """Ends the run. All workers that ask, now or later, are told so. No commit counts any
        more."""
        self.stopped = True
        return self._settle()

    def _welcome(self, worker: int) -> _LedgerWorker:
        """The worker's entry, which is made if it is new. A worker that comes late or back again
        starts level with the slowest: with fewer windows it would hold up all others (`slack`)."""
        member = self._members.get(worker)
        if member is None:
            member = self._members[worker] = _LedgerWorker(windows=self._slowest())
        elif not member.present:
            member.windows = max(member.windows, self._slowest())
            member.present = True
        return member

    def _slowest(self) -> int:
        """Windows of the slowest worker that is present and may have samples left to train; 0 until
        all first workers have joined."""
        if len(self._members) < self.job.workers:
            return 0
        # A worker that has finished its share commits nothing more, so nobody waits for it. In the
        # pool of all workers there may be samples again until the end, since any worker may die.
        working = (
            member.windows
            for worker, member in self._members.items()
            if member.present
            and (
                member.lease is not None
                or self.job.partition == LEASED
                or self._leases.has_free(self._pools(worker))
            )
        )
        return min(working, default=0)

    def _pools(self, worker: int) -> list[int]:
        """The pools of samples that the worker may lease from, those to be used up first first."""
        if self.job.partition == LEASED:
            return [0]
        absent = [
            number
            for number, member in sorted(self._members.items())
            if not member.present and number < self.job.workers
        ]
        own = [worker] if worker < self.job.workers else []
        return own + [number for number in absent if number != worker]

    def _apply(self, commit: Commit) -> list[Step]:
        """Counts the commit and returns the step that applies it, if one does."""
        # `_count` ends the commit's lease, so the workers with a lease are counted before: this
        # worker is one of them.
        workers = len(self.leases)
        staleness = self.staleness(commit)
        samples = self._count(commit)
        if commit.steps == 0:
            return []  # it only says that the stream has ended
        self.clock += 1
        # By a lock-free rule the worker has already written to the center itself.
        return [] if self.rule.lock_free else [_step_of(commit, staleness, samples, workers)]

    def _combine(self) -> list[Step]:
        """Counts the round if it is complete, and returns the step that applies it."""
        staged = sorted(worker for worker, waiting in self._waiting.items() if waiting.staged)
        if not staged or len(staged) < len(self.leases):
            return []
        arrivals = []
        for worker in staged:
            waiting = self._waiting[worker]
            waiting.staged, waiting.verdict = False, Verdict.APPLIED
            commit = waiting.turn.commit
            assert commit is not None
            samples = self._count(commit)
            if commit.steps:
                staleness = self.staleness(commit)
                arrivals.append(_step_of(commit, staleness, samples, len(staged)))
        self.clock += bool(arrivals)
        return [Combine(tuple(arrivals))] if arrivals else []

    def _count(self, commit: Commit) -> int:
        """Ends the commit's lease and returns how many samples counted."""
        member = self._members[commit.worker]
        assert member.lease is not None
        samples = self._leases.complete(member.lease, commit.samples)
        member.lease = None
        member.sequence = commit.sequence
        member.windows += 1
        seconds = commit.end_seconds - commit.begin_seconds
        if commit.steps and seconds > 0:
            member.speed = commit.steps / seconds
        if self._waited.get(commit.worker) != commit.sequence:
            self._heard.add(commit.worker)
        return samples

    def _settle(self) -> list[Step]:
        """Does all that can be done now: applies the round, then answers waiting turns."""
        steps: list[Step] = []
        order = list(self._waiting)
        gives_leases = True
        if self.rule.gathers and not self.stopped:
            steps += self._combine()
            # Leases of a round go out by worker, so that the order of arrival changes nothing.
            order.sort()
            # Decided once, because the first lease of the round makes `_round_may_begin` false.
            gives_leases = self._round_may_begin()
        for worker in order:
            waiting = self._waiting[worker]
            reply = self._reply(worker, waiting, gives_leases)
            if reply is None:
                continue
            del self._waiting[worker]
            if waiting.turn.pull and not (reply.done or reply.stop):
                steps.append(Read(worker))
            steps.append(Answer(worker, reply))
        return steps

    def _round_may_begin(self) -> bool:
        """Whether a rule that gathers may start a round: no lease is held, and for the first round
        all workers that the run starts with have asked."""
        if not self._started:
            present = {worker for worker, member in self._members.items() if member.present}
            all_have_asked = present == self._waiting.keys()
            self._started = all_have_asked and len(self._members) >= self.job.workers
        return self._started and not self.leases

    def _reply(self, worker: int, waiting: _WaitingTurn, gives_leases: bool) -> Reply | None:
        """The answer to a waiting turn; None if it must wait longer. `gives_leases`: whether new
        leases may go out now."""
        reply = Reply(waiting.verdict, waiting.refusal, clock=self.clock, samples=self.samples)
        if self.stopped:
            return replace(reply, stop=True)
        if waiting.staged:
            return None
        if not waiting.turn.lease:
            return reply
        if self.done:
            return replace(reply, done=True)
        member = self._members[worker]
        ahead = member.windows - self._slowest()
        slack = self.rule.slack
        if member.lease is None and gives_leases and (slack is None or ahead <= slack):
            # The rule may give slow workers shorter windows; None: the job's.
            steps = None
            if self.rule.dynamic_windows and self.job.window is not None and member.speed:
                fastest = max(m.speed for m in self._members.values() if m.present)
                steps = max(1, round(self.job.window * member.speed / fastest))
            member.lease = self._leases.take(steps, self._pools(worker))
        return None if member.lease is None else replace(reply, lease=member.lease)

    def state(self) -> dict[str, Any]:
        """The whole state, as values that JSON can hold."""
        return {
            "epochs": self.job.epochs,
            "workers": self.job.workers,
            "clock": self.clock,
            "stopped": self.stopped,
            "started": self._started,
            "leases": self._leases.state(),
            "members": [[worker, asdict(member)] for worker, member in self._members.items()],
            "waiting": [[worker, asdict(waiting)] for worker, waiting in self._waiting.items()],
        }

    @classmethod
    def restore(cls, job: Job, rule: Rule, state: dict[str, Any]) -> "Ledger":
        """The ledger that has this `state`, which may be of other epochs and workers than `job`."""
        ledger = cls(changed(job, state), rule)
        ledger.clock = state["clock"]
        ledger.stopped = state["stopped"]
        ledger._started = state["started"]
        ledger._leases = Leases.restore(ledger.job, state["leases"])
        for worker, fields in state["members"]:
            lease = fields["lease"] and Lease(**fields["lease"])
            ledger._members[worker] = _LedgerWorker(**{**fields, "lease": lease})
        for worker, fields in state["waiting"]:
            ledger._waiting[worker] = _waiting_turn_of(fields)
        ledger._restored = True
        return ledger


def changed(job: Job, state: dict[str, Any]) -> Job:
    """The job with the epochs and workers of a state. States of earlier versions do not tell them,
    because they did not change."""
    return replace(job, **{name: state[name] for name in CHANGING if state.get(name) is not None})


def _step_of(commit: Commit, staleness: int, samples: int, workers: int) -> Apply:
    """The step that applies a commit, alone or within a round."""
    return Apply(commit.worker, staleness, samples, commit.steps, commit.rate, workers)


def _waiting_turn_of(fields: dict[str, Any]) -> _WaitingTurn:
    """The waiting turn whose fields a state holds."""
    commit = fields["turn"]["commit"]
    turn = Turn(**{**fields["turn"], "commit": commit and Commit(**commit)})
    verdict, refusal = fields["verdict"], fields["refusal"]
    return _WaitingTurn(
        turn, verdict and Verdict(verdict), refusal and Refusal(refusal), fields["staged"]
    )


class Leases:
    """A run's samples as positions: which are free, which are held, and which are committed.

    The positions of each pool are cut into windows, in order. Samples of a dead worker are handed
    out again before any new ones of their pool. A stream has no epochs here: its positions run on
    until a worker meets the end. All of it is deterministic, and knows no workers, vectors or time.

    stop        number of positions of the run; None: a stream whose end is not known yet
    committed   number of samples that were committed
    number      of the next lease
    """

    def __init__(self, job: Job) -> None:
        if job.samples is None and job.window is None:
            raise UsageError("window", "a stream of unknown length has no shares; give a window")
        self._job = job
        self._positions = Positions(job)
        self.stop = None if job.samples is None else job.samples * job.epochs
        self.committed = 0
        # Of each pool: the first position that was never handed out.
        self._next = [start for start, _ in self._positions.pools]
        self.number = 0
        self._returned: list[tuple[int, int]] = []  # [start, stop) of positions, sorted
        self._held: dict[int, Lease] = {}  # by number

    @property
    def finished(self) -> bool:
        """Whether every position is committed."""
        if self.stop is None or self.has_free(range(len(self._next))):
            return False
        # A lease beyond the end of a stream holds no samples, so nothing depends on its commit.
        return all(lease.start >= self.stop for lease in self._held.values())

    def has_free(self, pools: Iterable[int]) -> bool:
        """Whether one of the pools has a position that nobody holds and that is not committed."""
        return any(self._spans_of(pool) or self._has_new(pool) for pool in pools)

    def take(self, steps: int | None = None, pools: Iterable[int] = (0,)) -> Lease | None:
        """Takes the next free positions of the first pool that has any: at most `steps` batches
        (None: the job's window). From the pool of all workers, a lease does not cross an epoch's
        end. If each worker commits only once, a lease is a worker's whole share. Returns None if no
        position is free."""
        for pool in pools:
            returned = self._spans_of(pool)
            if returned:
                start, end = returned[0]
                stop = self._stop_of(start, end, steps)
                self._returned.remove((start, end))
                if stop < end:
                    self._returned.append((stop, end))
                    self._returned.sort()
            elif self._has_new(pool):
                start = self._next[pool]
                stop = self._next[pool] = self._stop_of(start, self._end_of(pool), steps)
            else:
                continue
            # The numbers begin anywhere after a restart, so one of them may still be held.
            while self.number in self._held:
                self.number += 1
            lease = Lease(self.number, start, stop)
            self.number += 1
            self._held[lease.number] = lease
            return lease
        return None

    def _spans_of(self, pool: int) -> list[tuple[int, int]]:
        """The positions of a pool that were handed out and came back."""
        if len(self._next) == 1:
            return self._returned
        return [span for span in self._returned if self._positions.pool_of(span[0]) == pool]

    def _end_of(self, pool: int) -> int | None:
        """Where a pool ends; None: a stream whose end is not known yet."""
        return self.stop if len(self._next) == 1 else self._positions.pools[pool][1]

    def _has_new(self, pool: int) -> bool:
        end = self._end_of(pool)
        return end is None or self._next[pool] < end

    def _stop_of(self, start: int, end: int | None, steps: int | None) -> int:
        """Where a lease stops that starts at `start`. `end`: where the free positions end."""
        job = self._job
        if job.window is None:
            assert self.stop is not None and end is not None
            if job.partition != LEASED:
                return end
            # Rounded up, so that the shares of all workers cover the run.
            return min(start + -(-self.stop // job.workers), end)
        if job.partition == LEASED:
            stop = start + (steps or job.window) * job.batch
            if job.samples:
                stop = min(stop, (start // job.samples + 1) * job.samples)
            return stop if end is None else min(stop, end)
        # A worker goes through its share again and again, so its windows may cross epochs' ends.
        assert end is not None
        steps_of_lease = islice(self._positions.batches(start, end), steps or job.window)
        return max(stop for _, stop in steps_of_lease)

    def give_back(self, lease: Lease) -> None:
        """Frees a lease's positions. They are handed out again before all new ones."""
        del self._held[lease.number]
        stop = lease.stop if self.stop is None else min(lease.stop, self.stop)
        if lease.start < stop:
            self._returned.append((lease.start, stop))
            self._returned.sort()

    def complete(self, lease: Lease, samples: int) -> int:
        """Ends a lease and returns how many samples counted. In a stream, a commit of fewer samples
        than its lease has met the stream's end, which is noted. In a data set, all samples of the
        lease count."""
        del self._held[lease.number]
        length = lease.stop - lease.start
        if self._job.samples is None and samples < length:
            length = max(samples, 0)
            self.end(lease.start + length)
        self.committed += length
        return length

    def change(self, job: Job) -> None:
        """Goes on with a job of other epochs or workers. Nothing may be held. The positions of a
        share move, because the shares before it grow."""
        assert not self._held
        before, self._positions, self._job = self._positions, Positions(job), job
        if job.samples is None:
            return
        self.stop = job.samples * job.epochs
        moves = [
            new[0] - old[0] for old, new in zip(before.pools, self._positions.pools, strict=True)
        ]
        self._next = [at + move for at, move in zip(self._next, moves, strict=True)]
        shifts = [(span, moves[before.pool_of(span[0])]) for span in self._returned]
        self._returned = [(start + move, stop + move) for (start, stop), move in shifts]

    def end(self, stop: int) -> None:
        """Notes that the stream has no more than `stop` samples."""
        self.stop = stop if self.stop is None else min(stop, self.stop)
        kept = ((start, min(end, self.stop)) for start, end in self._returned)
        self._returned = [(start, end) for start, end in kept if start < end]

    def state(self) -> dict[str, Any]:
        """The whole state, as values that JSON can hold."""
        return {
            "stop": self.stop,
            "committed": self.committed,
            "next": list(self._next),
            "number": self.number,
            "returned": [list(span) for span in self._returned],
            "held": [[lease.number, lease.start, lease.stop] for lease in self._held.values()],
        }

    @classmethod
    def restore(cls, job: Job, state: dict[str, Any]) -> "Leases":
        """The leases that have this `state`."""
        leases = cls(job)
        leases.stop = state["stop"]
        leases.committed = state["committed"]
        # Runs from before there were shares kept the one pool's number by itself.
        following = state["next"]
        leases._next = list(following) if isinstance(following, list) else [following]
        leases.number = state["number"]
        leases._returned = [(start, stop) for start, stop in state["returned"]]
        leases._held = {number: Lease(number, start, stop) for number, start, stop in state["held"]}
        return leases
