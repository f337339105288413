"""A forced order of turns: what comes too early waits, so that a run can be replayed exactly."""

from collections.abc import Callable, Collection, Iterator

from dovetail.training.records import Turn


class TurnGate:
    """Lets turns pass in the order of the workers in `order`, one entry a turn.

    After the order's end, turns pass as they come.

    position   entries that have passed
    waiting    workers that wait for an answer, and cannot take a turn: their entries are skipped
    """

    def __init__(
        self,
        order: tuple[int, ...],
        position: int = 0,
        waiting: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self._order = order
        self.position = position
        self._waiting = waiting
        self._held: dict[int, Turn] = {}
        self._passed: dict[int, Turn] = {}
        self._gone: set[int] = set()

    def push(self, turn: Turn) -> Iterator[Turn]:
        """The turns that may be taken now, in order, each to be taken before the next is asked
        for. The one that a worker's last answer was lost for passes again, and does not count
        twice."""
        self._gone.discard(turn.worker)
        if self._passed.get(turn.worker) == turn:
            return iter([turn])
        self._held[turn.worker] = turn
        return self._release()

    @property
    def passed(self) -> tuple[Turn, ...]:
        """The last turn of each worker that has passed."""
        return tuple(self._passed.values())

    def recall(self, turn: Turn) -> None:
        """That turn has passed before, at a gate of the same order that is gone."""
        self._passed[turn.worker] = turn

    def drop(self, worker: int) -> Iterator[Turn]:
        """The worker is gone: its entries are passed over until it speaks again. The turns that
        may be taken now."""
        self._gone.add(worker)
        self._held.pop(worker, None)
        self._passed.pop(worker, None)
        return self._release()

    def _release(self) -> Iterator[Turn]:
        while self.position < len(self._order):
            worker = self._order[self.position]
            if worker in self._held:
                self.position += 1
                yield self._pass(worker)
            elif worker in self._gone or worker in self._waiting():
                self.position += 1
            else:
                return
        for worker in list(self._held):
            yield self._pass(worker)

    def _pass(self, worker: int) -> Turn:
        turn = self._passed[worker] = self._held.pop(worker)
        return turn
