"""Forks worker processes: the other end of `forking`. It runs as a file: `python fork_server.py
DESCRIPTOR PARENT PATHS MODULES`.

    request ──► fork ─► worker: `child.live`
    SIGCHLD ──► status ──► the process that asks

Nothing is imported before the process is bound to its parent's life, as in `child`.
"""

import array
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import Any

LENGTH_BYTES = 8
"""A request follows its length in so many bytes."""
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def serve(descriptor: int, parent: int, modules: list[str]) -> None:
    """Import, and fork a worker for each request, until the other end closes."""
    from dovetail.runtime.child import die_with

    die_with(parent)
    control = socket.socket(fileno=descriptor)
    for name in modules:
        # A worker that needs the module imports it again, and then says what is wrong.
        with suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    # The collector then writes to no page that workers share with the server.
    gc.freeze()
    # Ended workers interrupt the wait for requests.
    woken, wakes = os.pipe()
    for end in (woken, wakes):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        readable, _, _ = select.select([control.fileno(), woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
            # The other end is told the status of each worker that has ended.
            with suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    status = os.waitstatus_to_exitcode(ended[1])
                    with suppress(OSError):
                        control.send(json.dumps({"ended": ended[0], "status": status}).encode())
        if control.fileno() in readable and not _fork(control, (woken, wakes)):
            return


def _fork(control: socket.socket, own: tuple[int, ...]) -> bool:
    """Read a request and fork its worker; False if the other end is closed."""
    head, ancillary, _, _ = control.recvmsg(LENGTH_BYTES, socket.CMSG_SPACE(2 * 4))
    if not head:
        return False
    descriptors = array.array("i")
    for _, kind, data in ancillary:
        if kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data)
    left, content = int.from_bytes(head, "little"), b""
    while left:
        part = control.recv(min(left, 2**15))
        if not part:
            return False
        content, left = content + part, left - len(part)
    channel, errors = descriptors
    server = os.getpid()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            control.close()
            for end in own:
                os.close(end)
            status = _live(json.loads(content), channel, errors, server)
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(Exception):
                sys.stderr.flush()
            os._exit(status)
    os.close(channel)
    os.close(errors)
    control.send(json.dumps({"forked": pid}).encode())
    return True


def _live(request: dict[str, Any], channel: int, errors: int, server: int) -> int:
    """A worker's life, as that of a process of its own; return its exit status."""
    from dovetail.runtime.child import live

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Its output goes where its parent's errors go now.
    for own in (1, 2):
        os.dup2(errors, own)
    os.close(errors)
    os.setpgid(0, 0)
    # `ps` and `top` show what it runs: the end of its module's name, in 15 characters.
    name = ".".join(request["entry"].partition(":")[0].split(".")[-2:])
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)
    os.environ.clear()
    os.environ.update(request["environment"])
    if request["folder"]:
        with suppress(OSError):
            os.chdir(request["folder"])
    # All forks would draw what the server would have drawn. Python's own generator sees to itself.
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(None)
    return live(channel, server, request["cores"], request["entry"], request["paths"])


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path[:] = json.loads(sys.argv[3])
    serve(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[4]))
    os._exit(0)
