"""Builds the C++ runner of calls (`runner.cpp`) and loads it.

    runner.cpp ── C++ compiler, torch's headers ──► FOLDER/KEY/dovetail_runner.so

It is built once for each version of torch, Python and dovetail, in about half a minute, and stays
in the cache. A process that asks for it without the right to build it gets it only if it is there.
One that has no time to wait starts the build for the next one.
Everything works without it (`frontends.runners`), but calls then go through Python one by one.

FOLDER is `native` in the cache. DOVETAIL_RUNNER names another one; DOVETAIL_RUNNER=python has the
runner left out.
"""

import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dovetail.runtime.files import cache_folder, is_own
from dovetail.runtime.forking import for_workers
from dovetail.runtime.waiting import c_functions

SWITCH = "DOVETAIL_RUNNER"
"""The environment variable that names the runner's folder, or leaves it out."""
_NAME = "dovetail_runner"
_SOURCE = Path(__file__).with_name("runner.cpp")
_BUILD_SECONDS = 600.0
"""A compiler that has not ended after this long is stopped."""
_reason = ""
_beside: "subprocess.Popen[bytes] | None" = None
"""Builds the runner for the next process."""


def native_runner() -> Any | None:
    """The module of the C++ runner, if it was built; None if it was not or is switched off."""
    if os.environ.get(SWITCH) == "python":
        return None
    path = _path()
    # This process has measured without the runner, and both kinds of costs must not be mixed.
    if _beside is not None:
        return None
    # It is code, so a file that somebody else can write is as good as missing.
    return _loaded(path) if is_own(path) else None


def build_native(
    tell: Callable[[str], None] = lambda _doing: None,
    meanwhile: Callable[[], None] = lambda: None,
    *,
    anew: bool = False,
) -> str:
    """Build the runner unless it is there, and return why there is none; "" if there is one.

    tell        is called with what is being done, if that takes long
    meanwhile   is called while the compiler is at work
    anew        what is built beside is waited for, and serves from now on
    """
    global _beside, _reason
    if anew and _beside is not None:
        tell("building the C++ runner, which has begun")
        _beside.wait()
        _beside, _reason = None, ""
        del for_workers[SWITCH]
    if os.environ.get(SWITCH) == "python":
        return f"{SWITCH}=python leaves the C++ runner out"
    if native_runner() is not None:
        return ""
    if not _reason:
        tell("building the C++ runner, once for this version of torch")
        _reason = _build(_path(), meanwhile)
    return _reason


def build_beside() -> None:
    """Have another process build the runner, unless it is there; this one goes on without it."""
    global _beside, _reason
    off = os.environ.get(SWITCH) == "python" or _reason or not has_compiler()
    if off or native_runner() is not None or not sys.executable:
        return
    # The compiler must not slow down what this process measures.
    code = "import os; os.nice(19); from dovetail.runtime.native import build_native as f; f()"
    nowhere = subprocess.DEVNULL
    with suppress(OSError):
        _beside = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True,
        )  # fmt: skip
        # Workers that start when the build is done must not load the runner either.
        for_workers[SWITCH] = "python"
        _reason = "the C++ runner is being built for the next process, as there is no time to wait"


def cxx_compiler() -> str | None:
    """The command of the C++ compiler that torch would take; None if there is none."""
    usual = "clang++" if sys.platform == "darwin" else "g++"
    command = os.environ.get("CXX") or usual
    name = shlex.split(command)[:1]
    return command if name and shutil.which(name[0]) else None


def has_compiler() -> bool:
    """True if there is a C++ compiler."""
    return cxx_compiler() is not None


def _build(path: Path, meanwhile: Callable[[], None]) -> str:
    compiler = cxx_compiler()
    if compiler is None:
        return "there is no C++ compiler (g++ or clang++)"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Several processes may build at once: each builds a file of its own and puts it in place.
        with TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder) / path.name
            command = [*shlex.split(compiler), str(_SOURCE), *_flags(), "-o", str(built)]
            # In a session of its own, so that the compiler's own processes end with it.
            with subprocess.Popen(
                command, stderr=subprocess.PIPE, text=True, start_new_session=True
            ) as running:
                try:
                    meanwhile()
                    _, said = running.communicate(timeout=_BUILD_SECONDS)
                finally:
                    with suppress(ProcessLookupError):
                        os.killpg(running.pid, signal.SIGKILL)
            if running.returncode:
                errors = [line for line in said.splitlines() if "error" in line]
                told = (errors or said.splitlines() or ["it says nothing"])[0]
                return f"{compiler} could not build the C++ runner: {told.strip()}"
            built.chmod(0o700)
            built.replace(path)
        _loaded.cache_clear()
        if _loaded(path) is None:
            return "the C++ runner that was built cannot be loaded"
    except (OSError, subprocess.SubprocessError) as error:
        return f"the C++ runner could not be built: {error}"
    return ""


def _flags() -> list[str]:
    import torch

    # Those of `torch.utils.cpp_extension`, which needs setuptools to be imported.
    root = Path(torch.__file__).parent
    headers = root / "include", root / "include" / "torch" / "csrc" / "api" / "include"
    # Libraries come after the source: a linker may leave out those that nothing needs so far.
    python = sysconfig.get_paths()["include"]
    abi = int(torch.compiled_with_cxx11_abi())
    undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    return [
        "-O2", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-w", *undefined,
        f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        *(f"-I{folder}" for folder in (*headers, python)),
        f"-L{root / 'lib'}",
        "-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10",
    ]  # fmt: skip


@cache
def _loaded(path: Path) -> Any | None:
    """The module in a file; None for one that cannot be loaded."""
    import torch  # noqa: F401  the file links to its libraries

    spec = spec_from_file_location(_NAME, path, loader=ExtensionFileLoader(_NAME, str(path)))
    assert spec is not None and spec.loader is not None, "both were given"
    try:
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        module.use_waiting(*c_functions())
    except (ImportError, AttributeError):  # a damaged file, or one of another build of torch
        return None
    return module


def _path() -> Path:
    folder = os.environ.get(SWITCH)
    return (Path(folder) if folder else cache_folder() / "native") / _digest() / f"{_NAME}.so"


@cache
def _digest() -> str:
    """16 hex digits over all that the built file depends on."""
    import torch

    parts = (torch.__version__, sys.version, sysconfig.get_platform())
    code = _SOURCE.read_bytes() + Path(__file__).read_bytes()  # how it is built counts as well
    return hashlib.sha256("\n".join(parts).encode() + code).hexdigest()[:16]
