"""Runs programs of Python in processes that are forked from one that has imported the package.

    this process ── words, folder, environment, ends of two pipes ──► server ── fork ──► program
                 ◄── its process id; when asked, its exit status ──      │ has imported torch

`python -m dovetail plan` imports for 3 to 7 s before it does anything, and the suite runs hundreds
of such programs. A forked program has all that a program has of its own: a process, `__main__`,
`sys.argv`, a folder, an environment, outputs, an end of Python and an exit status. Only its imports
are done. A test of those, or of what libraries read from the environment when they are imported,
starts its programs by `subprocess`.

A fork is safe from a process of one thread that has not used OpenMP: the server does nothing but
import and fork, and refuses to fork if it has more threads than that.

The fork servers of the package, from which commands and tests have their workers, are forked in the
same way: a command's by the command itself while it has one thread, the tests' by the server. That
one which is started by itself imports and forks is tested in runtime/test_forking.py, and commands
that are started by themselves in contract/test_defaults.py.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import math
import os
import pkgutil
import runpy
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
import types
from pathlib import Path

LEFT_OUT = (".__main__", ".ray", ".integrations")
"""Modules of the package that are not imported: what runs, and what needs libraries of its own."""
LIBRARIES = ("torch._dynamo", "torch.fx.experimental.proxy_tensor", "cloudpickle", "rich.progress")
"""What the package imports within functions."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
MOST_THREADS = 1024
"""Workers of several threads are forked, too: they set their number themselves, as all do, and how
OpenMP's threads wait is the same in all tests."""
_NUMBER = struct.Struct("<q")
"""A request follows its length, and each answer is a number."""
_PR_SET_PDEATHSIG = 1


# ── The end of the tests ──


class Forked:
    """What was forked, with what tests use of `subprocess.Popen`."""

    def __init__(self, server, pid):
        self.pid, self.returncode = pid, None
        self._server, self._life = server, os.pidfd_open(pid)

    def wait(self, timeout=None):
        if self.returncode is None:
            life = select.poll()
            life.register(self._life, select.POLLIN)
            if not life.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired("a forked program", timeout)
            os.close(self._life)
            self.returncode = self._server.status_of(self.pid)
        return self.returncode

    def poll(self):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)

    def send_signal(self, number):
        if self.poll() is None:
            signal.pidfd_send_signal(self._life, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


class Process(Forked):
    """A forked program, whose outputs are pipes."""

    def __init__(self, server, pid, outputs):
        super().__init__(server, pid)
        self.stdout, self.stderr = map(os.fdopen, outputs)
        self._read = {self.stdout: [], self.stderr: []}

    def communicate(self, timeout=None):
        """What it writes until it has ended: (standard output, standard error)."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with selectors.DefaultSelector() as ends:
            for end in self._read:
                if not end.closed:
                    ends.register(end, selectors.EVENT_READ)
            while ends.get_map():
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise subprocess.TimeoutExpired("a forked program", timeout)
                for key, _ in ends.select(left):
                    content = os.read(key.fd, 2**16)
                    self._read[key.fileobj].append(content)
                    if not content:
                        ends.unregister(key.fileobj)
                        key.fileobj.close()
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        texts = (b"".join(parts).decode() for parts in self._read.values())
        out, errors = (text.replace("\r\n", "\n").replace("\r", "\n") for text in texts)
        return out, errors


class Server:
    """The process that forks, from this process's end. It ends with this process."""

    def __init__(self):
        own, other = socket.socketpair()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(other.fileno())],
                pass_fds=(other.fileno(),),
                env=os.environ | dict.fromkeys(THREADS, "1"),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._socket = own
        atexit.register(self.close)

    def close(self):
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def start(self, words, folder, environment, forks):
        """The program `python WORDS`; None if none can be forked."""
        (out, own_out), (errors, own_errors) = os.pipe(), os.pipe()
        request = {
            "words": words, "folder": str(folder), "environment": environment, "forks": forks
        }  # fmt: skip
        pid = self._ask(request, own_out, own_errors)
        for end in (own_out, own_errors):
            os.close(end)
        if pid > 0:
            return Process(self, pid, (out, errors))
        for end in (out, errors):
            os.close(end)
        return None

    def launch_server(self, descriptor, modules):
        """A fork server of the package for this process; None if none can be forked."""
        from dovetail.runtime.forking import environment_of

        request = {"modules": modules, "paths": sys.path, "environment": environment_of(1)}
        pid = self._ask(request, descriptor, 2)
        return Forked(self, pid) if pid > 0 else None

    def status_of(self, pid):
        """The exit status of a program that has ended; of one whose server is gone, of a kill."""
        return self._ask({"ended": pid})

    def _ask(self, request, *descriptors):
        content = json.dumps(request).encode()
        try:
            socket.send_fds(self._socket, [_NUMBER.pack(len(content))], descriptors)
            self._socket.sendall(content)
            answer = self._socket.recv(_NUMBER.size, socket.MSG_WAITALL)
        except OSError:
            answer = b""
        return _NUMBER.unpack(answer)[0] if answer else -signal.SIGKILL


_servers = []
"""The server of this process, once there is one."""


def start(words, *, cwd, env, forks=None):
    """Start `python WORDS` with pipes for its outputs, as text: forked where it can be.

    forks   whether the processes that it starts are forked, too; None: those of commands are
    """
    words = [str(word) for word in words]
    if forks is None:
        forks = words[:2] == ["-m", "dovetail"]
    if hasattr(os, "pidfd_open"):
        process = _server().start(words, cwd, env, forks)
        if process is not None:
            return process
    return subprocess.Popen(
        [sys.executable, *words], cwd=cwd, env=env,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def _server():
    if not _servers:
        _servers.append(Server())
    return _servers[0]


@contextlib.contextmanager
def workers_forked(*modules):
    """Within, workers that this process starts are forked, as those of a command are, by a fork
    server of their own: one that runs already is put aside.

    modules   what the fork server imports, so that none of them does
    """
    from dovetail.runtime import forking

    aside, forking._server = forking._server, None
    launch = forking.launch_server
    if hasattr(os, "pidfd_open"):
        forking.launch_server = lambda *given: _server().launch_server(*given) or launch(*given)
    try:
        forking.start_fork_server(modules)
    finally:
        forking.launch_server = launch
    if server := forking.fork_server():
        server.most_threads = MOST_THREADS
    try:
        yield
    finally:
        forking.end_fork_server()
        forking._server = aside


# ── The server, and the programs that it becomes ──


def serve(control):
    """Import, and fork a process for each request until the other end closes. Returns twice: None
    at the end, and in each process what it is to become."""
    for name in (*LIBRARIES, *_modules()):
        # What cannot be imported here is no matter of a program that does not use it.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    # As in the process of the tests, what else this machine does is no matter of theirs: measured
    # costs are kept all the same, and nobody waits long for cores that are quiet.
    sys.modules["dovetail.runtime.neighbours"].BUSY_CORES = math.inf
    sys.modules["dovetail.costs.measured"]._PATIENCE_SECONDS = 1.0
    gc.collect()
    # The collector then writes to no page that programs share with the server.
    gc.freeze()
    while True:
        try:
            head, descriptors, _, _ = socket.recv_fds(control, _NUMBER.size, 2)
        except ConnectionError:
            return None
        if not head:
            return None
        content, left = [], _NUMBER.unpack(head)[0]
        while left:
            content.append(control.recv(min(left, 2**16)))
            left -= len(content[-1])
        request = json.loads(b"".join(content))
        if "ended" in request:
            _, status = os.waitpid(request["ended"], 0)
            control.sendall(_NUMBER.pack(os.waitstatus_to_exitcode(status)))
            continue
        pid = os.fork() if len(os.listdir("/proc/self/task")) == 1 else -1
        if not pid:
            control.close()
            return {**request, "descriptors": descriptors}
        for descriptor in descriptors:
            os.close(descriptor)
        control.sendall(_NUMBER.pack(pid))


def _modules(package="dovetail"):
    """The names of the package's modules, each package before those in it."""
    folder = importlib.import_module(package).__path__
    for module in pkgutil.iter_modules(folder, f"{package}."):
        if not any(part in module.name for part in LEFT_OUT):
            yield module.name
            if module.ispkg:
                yield from _modules(module.name)


def launch_within(launch, descriptor, modules):
    """Fork a fork server of the package from this program; `launch` one if it has more threads than
    one."""
    from dovetail.runtime.forking import environment_of

    if len(os.listdir("/proc/self/task")) > 1:
        return launch(descriptor, modules)
    environment, parent = environment_of(1), os.getpid()
    if pid := os.fork():
        return Child(pid)
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # A program that is executed has these descriptors alone.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.closerange(3, descriptor)
        os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))
        serve_forks(modules, sys.path, environment, [descriptor, 2], parent)
    finally:
        os._exit(1)


class Child:
    """A child of this process, with what `ForkServer` needs of `subprocess.Popen`."""

    def __init__(self, pid):
        self.pid = pid

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)

    def wait(self):
        os.waitpid(self.pid, 0)


def serve_forks(modules, paths, environment, descriptors, parent):
    """Be a fork server of the package, of this parent."""
    control, errors = descriptors
    for own in (1, 2):
        os.dup2(errors, own)
    if errors > 2:
        os.close(errors)
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = paths
    sys.modules["dovetail.runtime.fork_server"].serve(control, parent, modules)
    os._exit(0)


def become(words, folder, environment, forks, descriptors):
    """Run `python WORDS` in this process."""
    for own, output in enumerate(descriptors, start=1):
        os.dup2(output, own)
        os.close(output)
    forking = sys.modules["dovetail.runtime.forking"]
    forking.launch_server = functools.partial(launch_within, forking.launch_server)
    forking.ForkServer.most_threads = MOST_THREADS
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    # All programs would draw what the server would have drawn. Python's own generator sees to
    # itself, and torch's is the same in every process that begins.
    sys.modules["numpy"].random.seed(None)
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    if forks:
        forking.start_fork_server()
    kind, *rest = words
    if kind == "-m":
        name, *arguments = rest
        sys.path[:0] = [folder, *paths]
        sys.argv = [name, *arguments]
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    if kind == "-c":
        text, *arguments = rest
        file, first = "<string>", ""
    else:
        text, arguments = Path(kind).read_text("utf-8"), rest
        file, first = kind, str(Path(kind).resolve().parent)
    sys.path[:0] = [first, *paths]
    sys.argv = ["-c" if kind == "-c" else kind, *arguments]
    main = types.ModuleType("__main__")
    if kind != "-c":
        main.__file__ = file
    sys.modules["__main__"] = main
    exec(compile(text, file, "exec"), vars(main))


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The folder of this file holds modules of the tests.
    del sys.path[0]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as end:
        program = serve(end)
    if program is None:
        os._exit(0)
    if "modules" in program:
        serve_forks(**program, parent=os.getppid())
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    become(**program)
