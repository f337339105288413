"""Forces an order on turns, so that a run can be replayed exactly. A turn that is early waits."""

from collections.abc import Callable, Collection, Iterator

from dovetail.training.records import Turn


class TurnGate:
    """Lets turns pass in the order of `order`, whose entries are workers: one entry per turn.

    After the order's end, turns pass as they come.

    position   number of entries that have passed
    waiting    returns the workers that wait for an answer. They cannot take a turn, so their
               entries are skipped.
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
        """Takes in a turn and yields the turns that may be taken now, in order. The caller takes
        each turn before it asks for the next. A worker whose answer was lost sends its last turn
        again; that turn passes at once and takes no entry of the order."""
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
        """Notes a turn that has passed at an earlier gate of the same order, before a restart."""
        self._passed[turn.worker] = turn

    def drop(self, worker: int) -> Iterator[Turn]:
        """Notes that the worker is gone, and yields the turns that may be taken now. Its entries
        are skipped until it sends a turn again."""
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
            # `waiting` is called anew for each entry: the turn that was just taken may have made
            # its worker wait.
            elif worker in self._gone or worker in self._waiting():
                self.position += 1
            else:
                return
        for worker in list(self._held):
            yield self._pass(worker)

    def _pass(self, worker: int) -> Turn:
        turn = self._passed[worker] = self._held.pop(worker)
        return turn
