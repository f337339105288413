"""Messages between the ranks of a training. Each is a frame: a kind, a JSON object, and a vector.

rank k ── RANK, INTERRUPTED, ENDED, BEAT ──────────► rank 0          control: one for each rank
       ◄─ WELCOME, START, KILL, END, REFUSED, FAILED, BEAT ──
       ── ARRIVED, FINISHED ───────────────────────► rank 0          in loops of the caller's
       ◄─ ARRIVED, END ──
worker ── WORKER, JOIN, TURN, COPY, ALIVE, LEAVE ──► its stand-in    one for each worker
       ◄─ JOINED, REPLY, COPIED ──
"""

from enum import StrEnum


class TrainingMessage(StrEnum):
    """A message's kind, with the fields of its JSON object."""

    # First frames, by which rank 0 knows who connects.
    RANK = "rank"  # rank, host, version, facts: what all ranks must agree on
    WORKER = "worker"  # ticket: number of this start of a worker

    # Rank 0 to another rank
    WELCOME = "welcome"  # run: the run's name
    START = "start"  # worker, ticket: start this worker
    KILL = "kill"  # ticket: end this worker
    END = "end"  # the run has ended: clock, samples, seconds, stopped; its vector is the result
    REFUSED = "refused"  # option, says: the ranks do not agree
    FAILED = "failed"  # said: the run has failed

    # Another rank to rank 0
    ENDED = "ended"  # ticket, status, traceback: a worker has ended, by an exception if it has one
    INTERRUPTED = "interrupted"  # Ctrl-C was pressed there
    FINISHED = (
        "finished"  # clock: of the center that it pulled last; the vector, if any, is its own
    )

    # Both
    ARRIVED = "arrived"  # this rank waits for all; rank 0: all do, and the vector is its own
    BEAT = "beat"
    LOST = "lost"  # said: never sent; the last message that a broken connection gives

    # A worker to its stand-in, which answers JOIN by JOINED, TURN by REPLY and COPY by COPIED
    JOIN = "join"
    TURN = "turn"  # a turn's fields; the vector is the commit's, encoded
    COPY = "copy"
    ALIVE = "alive"
    LEAVE = "leave"
    JOINED = "joined"  # sequence: of the last applied commit; seconds: of the run's clock
    REPLY = "reply"  # a reply's fields; the vector is the center, if it was asked for
    COPIED = "copied"  # the vector is the center as it is now
