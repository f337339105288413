"""One end of the socket pair between a process and its worker."""

import pickle
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any


@dataclass(frozen=True)
class Failure:
    """What a worker sends in place of a reply when its entry function raised."""

    traceback: str


class Channel:
    """Sends and receives objects and file descriptors, in order.

    Both ends are ours, so pickles are safe. They are plain ones: `Connection.send` would pass
    tensors by torch's own sharing, whose files outlive a killed process.
    """

    def __init__(self, descriptor: int) -> None:
        self._connection = Connection(descriptor)

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: object) -> None:
        self._connection.send_bytes(pickle.dumps(message, protocol=5))

    def receive(self) -> Any:
        """The next message. Raises `EOFError` once the other end is closed."""
        try:
            content = self._connection.recv_bytes()
        except ConnectionError as error:  # closed with messages of ours unread: a reset
            raise EOFError from error
        return pickle.loads(content)

    def poll(self, timeout_seconds: float) -> bool:
        """True if `receive` would not block."""
        return self._connection.poll(timeout_seconds)

    def send_descriptor(self, descriptor: int) -> None:
        """Give the other process a copy of an open file; it calls `receive_descriptor`."""
        send_handle(self._connection, descriptor, None)

    def receive_descriptor(self) -> int:
        return recv_handle(self._connection)

    def close(self) -> None:
        self._connection.close()
