"""Connections between the ranks of a training: who may open one, and what goes through it.

They are TCP, or between two processes of one host Unix sockets, whose names are the kernel's own
and leave nothing behind.

    rank k ── nonce ──────────────────────────► rank 0
           ◄─ nonce, HMAC(token, both) ────────          rank 0 knows the token
           ── HMAC(token, both) ──────────────►          and so does rank k
           ◄─ frames ─────────────────────────►

    frame   magic 4 │ bytes of head 4 │ bytes of body 8 │ checksum 8 │ head: JSON │ body

Who does not know the token is let go before anything else is read. Each side states how many bytes
it accepts, and a frame of more ends the connection, like one that does not match its checksum.
Bodies are a vector's bytes. Nothing is unpickled. Frames are neither encrypted nor signed.
Encrypted, 10 MB there and back took 3.7 times as long by pyzmq with CURVE and 1.8 times by TLS, and
100 MB 4.9 and 2.5 times as long: a commit would take that much longer.
"""

import hmac
import ipaddress
import json
import os
import secrets
import socket
import struct
import threading
import time
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from dovetail.runtime.ranks import SILENT_SECONDS
from dovetail.runtime.watch import Watch
from dovetail.training.backends.ranks.messages import TrainingMessage

Address = tuple[str, int] | str
"""Where rank 0 listens: host and port, or the name of a Unix socket."""
TOKEN_BYTES = 32
HANDSHAKE_SECONDS = 10.0
"""A process that connects must prove within this time that it knows the token."""
HEAD_BYTES = 1 << 18
"""The head of a frame is at most so long; with it go settings and one traceback."""
BEAT_SECONDS = 1.0
"""Both ends of a control connection show their life this often."""
STALLED_SECONDS = 30.0
"""A connection whose other end takes nothing for so long, or whose host is gone, is given up by the
kernel."""
_MOST_HANDSHAKES = 64
"""At most so many are being checked at once; when another comes, the oldest is let go."""
_PART_BYTES = 1 << 20
_MAGIC = b"DVR1"
_HEAD = struct.Struct("<4sIQQ")
_NONCE_BYTES = 32
_ROLES = b"rank 0", b"rank k"
_CREDENTIALS = struct.Struct("3i")
"""The kernel's `struct ucred`: process, user and group at the other end of a Unix socket."""

Octets = NDArray[np.uint8]
NOTHING: Octets = np.zeros(0, np.uint8)


class Connection:
    """Sends and receives frames over a connected socket. One thread receives, any may send.

    `send` and `receive` raise `ConnectionError` once the connection is of no more use.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._lock = threading.Lock()
        self.heard = time.monotonic()
        """When the other end was last heard of: any part of a frame counts."""

    @property
    def is_beside(self) -> bool:
        """True if the other end is on this host, at a Unix socket."""
        return self._socket.family == socket.AF_UNIX

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: str, content: dict[str, Any], body: NDArray[Any] = NOTHING) -> None:
        """Sends a frame. `content` is anything that JSON holds, `body` any contiguous array."""
        # numpy's numbers become Python's.
        text = json.dumps([kind, content], separators=(",", ":"), default=lambda each: each.item())
        head, octets = text.encode(), body.reshape(-1).view(np.uint8)
        digest = xxhash.xxh3_64(head)
        digest.update(octets.data)
        start = _HEAD.pack(_MAGIC, len(head), octets.size, digest.intdigest())
        with self._lock:
            try:
                self._socket.sendall(start + head)
                if octets.size:
                    self._socket.sendall(octets.data)
            except OSError as error:
                raise ConnectionError(f"its connection broke ({error.strerror})") from error

    def receive(
        self, body_bytes: int = 0, deadline: float | None = None
    ) -> tuple[str, dict[str, Any], Octets]:
        """The next frame's kind, content and body, which may be read until the next one is.

        body_bytes   what a body may have; one of any other size than this or 0 is refused
        deadline     by `time.monotonic()`, when the frame must be here
        """
        magic, head_bytes, sent_bytes, checksum = _HEAD.unpack(
            self._read(_HEAD.size, deadline).data
        )
        if magic != _MAGIC or head_bytes > HEAD_BYTES or sent_bytes not in (0, body_bytes):
            raise ConnectionError("it sent what is no frame of ours")
        head = self._read(head_bytes, deadline)
        body = self._read(sent_bytes, deadline)
        digest = xxhash.xxh3_64(head.data)
        digest.update(body.data)
        if digest.intdigest() != checksum:
            raise ConnectionError("a frame was changed on its way")
        try:
            kind, content = json.loads(head.tobytes())
        except (ValueError, TypeError, RecursionError):
            kind = content = None
        if not isinstance(kind, str) or not isinstance(content, dict):
            raise ConnectionError("it sent what is no frame of ours")
        return kind, content, body

    def _read(self, count: int, deadline: float | None) -> Octets:
        octets = np.empty(count, np.uint8)
        for begin in range(0, count, _PART_BYTES):
            _read_into(self._socket, octets[begin : begin + _PART_BYTES], deadline)
            self.heard = time.monotonic()
        return octets

    def close(self) -> None:
        # Wakes a thread that receives.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def detach(self) -> int:
        """The descriptor, which is the caller's from then on."""
        return self._socket.detach()


def _read(connected: socket.socket, count: int, deadline: float | None = None) -> Octets:
    octets = np.empty(count, np.uint8)
    _read_into(connected, octets, deadline)
    return octets


def _read_into(connected: socket.socket, octets: Octets, deadline: float | None) -> None:
    """Fills `octets`. Raises `ConnectionError`."""
    view, done = octets.data, 0
    try:
        while done < octets.size:
            if deadline is not None:
                connected.settimeout(max(deadline - time.monotonic(), 0.001))
            got = connected.recv_into(view[done:])
            if not got:
                raise ConnectionError("its connection was closed")
            done += got
    except TimeoutError:
        raise ConnectionError("it said nothing") from None
    except OSError as error:
        if isinstance(error, ConnectionError) and not error.errno:
            raise
        raise ConnectionError(f"its connection broke ({error.strerror})") from error


# ── Who is let in ──


def connect(address: Address, token: bytes) -> Connection:
    """A connection with rank 0, which has proven that it knows the token. Raises `OSError` if there
    is none, or whoever is there does not know it."""
    if isinstance(address, str):
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connected.settimeout(HANDSHAKE_SECONDS)
    else:
        connected = socket.create_connection(address, HANDSHAKE_SECONDS)
    try:
        if isinstance(address, str):
            connected.connect(f"\0{address}")
            _check_user(connected)
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        nonce = secrets.token_bytes(_NONCE_BYTES)
        connected.sendall(nonce)
        other = _read(connected, _NONCE_BYTES, deadline).tobytes()
        proof = _read(connected, _NONCE_BYTES, deadline).tobytes()
        if not hmac.compare_digest(proof, _proof(token, _ROLES[0], nonce, other)):
            raise ConnectionError("whoever listens there does not know the run's token")
        connected.sendall(_proof(token, _ROLES[1], nonce, other))
    except BaseException:
        connected.close()
        raise
    return Connection(_set_up(connected))


def _admit(connected: socket.socket, token: bytes, deadline: float) -> Connection:
    """A connection with whoever has connected, once that knows the token. Raises `ConnectionError`
    if it does not."""
    if connected.family == socket.AF_UNIX:
        _check_user(connected)
    nonce = _read(connected, _NONCE_BYTES, deadline).tobytes()
    own = secrets.token_bytes(_NONCE_BYTES)
    connected.sendall(own + _proof(token, _ROLES[0], nonce, own))
    proof = _read(connected, _NONCE_BYTES, deadline).tobytes()
    if not hmac.compare_digest(proof, _proof(token, _ROLES[1], nonce, own)):
        raise ConnectionError("it does not know the run's token")
    return Connection(_set_up(connected))


def _proof(token: bytes, role: bytes, nonce: bytes, answer: bytes) -> bytes:
    return hmac.digest(token, role + nonce + answer, "sha256")


def user_of(connected: socket.socket) -> int:
    """The user of the process at the other end of a Unix socket."""
    packed = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(packed)[1])


def _check_user(connected: socket.socket) -> None:
    if user_of(connected) != os.getuid():
        raise ConnectionError("it is another user's")


def _set_up(connected: socket.socket) -> socket.socket:
    connected.settimeout(None)
    if connected.family == socket.AF_UNIX:
        return connected
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_USER_TIMEOUT, round(1000 * STALLED_SECONDS)),
        # The other host's kernel is asked for life when nothing is sent.
        (socket.TCP_KEEPIDLE, round(STALLED_SECONDS / 3)),
        (socket.TCP_KEEPINTVL, round(STALLED_SECONDS / 6)),
    ):
        connected.setsockopt(socket.IPPROTO_TCP, option, value)
    return connected


Came = SimpleQueue[tuple[Connection, str, dict[str, Any]]]


class Door:
    """Rank 0's listening socket, on an address of this host, or with "" for this host's processes
    alone. `came` holds each connection that was let in, with its first frame: (connection, kind,
    content). Several doors may share it."""

    def __init__(self, host: str, token: bytes, came: Came | None = None) -> None:
        self._token = token
        self.address: Address
        if host:
            family, *_, found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            if ipaddress.ip_address(str(found[0]).partition("%")[0]).is_unspecified:
                raise OSError(f"{host!r} stands for every address of this machine")
            self._listener = socket.create_server((host, 0), family=family)
            self.address = self._listener.getsockname()[:2]
        else:
            self.address = f"dovetail-{secrets.token_hex(16)}"
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(f"\0{self.address}")
            self._listener.listen()
        self.came: Came = SimpleQueue() if came is None else came
        self._checked: list[socket.socket] = []
        self._closed = threading.Event()
        threading.Thread(target=self._accept, name="door", daemon=True).start()

    def next(self, timeout_seconds: float) -> tuple[Connection, str, dict[str, Any]] | None:
        """The next of `came`; None if there is none within the time."""
        with suppress(Empty):
            return self.came.get(timeout=timeout_seconds)
        return None

    def close(self) -> None:
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        while (came := self.next(0.001)) is not None:
            came[0].close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connected, _ = self._listener.accept()
                if len(self._checked) >= _MOST_HANDSHAKES:
                    # Its thread closes it.
                    with suppress(OSError, IndexError):
                        self._checked[0].shutdown(socket.SHUT_RDWR)
                self._checked.append(connected)
                threading.Thread(target=self._check, args=(connected,), daemon=True).start()
            # Closed, or out of descriptors or threads for a while.
            except (OSError, RuntimeError):
                time.sleep(_RETRY_SECONDS)

    def _check(self, connected: socket.socket) -> None:
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        try:
            admitted = _admit(connected, self._token, deadline)
            kind, content, _ = admitted.receive(deadline=deadline)
            connected.settimeout(None)
            self.came.put((admitted, kind, content))
        except OSError:
            connected.close()
        finally:
            self._checked.remove(connected)


_RETRY_SECONDS = 0.1


# ── Control ──


class Control:
    """A connection of rank 0 with another rank.

    host         name of the other end's host
    body_bytes   what a message's body may have
    beats        both show their life on it, and are lost when they are silent. Without, a process
                 may hold its interpreter for long, and only the end of it or of its host is noticed
    """

    def __init__(
        self, connection: Connection, host: str, body_bytes: int = 0, *, beats: bool = True
    ) -> None:
        self.host = host
        self._connection, self._body_bytes = connection, body_bytes
        self._messages: SimpleQueue[tuple[str, dict[str, Any], Octets]] = SimpleQueue()
        self._closing = threading.Event()
        for loop in (self._listen, self._show_life) if beats else (self._listen,):
            threading.Thread(target=loop, name="control", daemon=True).start()

    def send(self, kind: str, content: dict[str, Any], body: NDArray[Any] = NOTHING) -> None:
        """Sends a message. If the connection is broken, `LOST` is among the messages that come."""
        with suppress(ConnectionError):
            self._connection.send(kind, content, body)

    def next(self, timeout_seconds: float = 0.0) -> tuple[str, dict[str, Any], Octets] | None:
        """The next message; None if there is none within the time."""
        with suppress(Empty):
            if timeout_seconds:
                return self._messages.get(timeout=timeout_seconds)
            return self._messages.get_nowait()
        return None

    def close(self) -> None:
        self._closing.set()
        self._connection.close()

    def _listen(self) -> None:
        try:
            while True:
                message = self._connection.receive(self._body_bytes)
                if message[0] != TrainingMessage.BEAT:
                    self._messages.put(message)
        except ConnectionError as error:
            self._messages.put((TrainingMessage.LOST, {"said": str(error)}, NOTHING))

    def _show_life(self) -> None:
        watch = Watch(BEAT_SECONDS)
        while not self._closing.wait(BEAT_SECONDS):
            self.send(TrainingMessage.BEAT, {})
            watch.tick()
            if watch.still_seconds("the other end", self._connection.heard) >= SILENT_SECONDS:
                said = f"it was silent for {SILENT_SECONDS:g} s"
                self._messages.put((TrainingMessage.LOST, {"said": said}, NOTHING))
                self._connection.close()
                return
