"""How a run uses a cluster, and joining or starting one."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from dovetail.errors import MissingLibraryError, UsageError
from dovetail.training.options import not_negative

_LOOPBACK = "127.0.0.1"
_LOCAL = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Of Ray's own making, for other systems: its processes take the loopback address as theirs.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


@dataclass(frozen=True)
class Options:
    """address     of a cluster to join ("auto": the one of this machine); None: start Ray here, for
                  this run alone, on the loopback interface
    namespace     of the actors' names; None: of the run
    worker_cores, server_cores           that Ray sets aside for each
    worker_resources, server_resources   custom resources that their nodes must have
    server_node   the node's id or address that should hold the server; when it is lost, another may
    spread        workers over the nodes; else they are packed
    object_store_bytes   of a Ray started here; None: its choice
    log_to_driver        show what actors print
    late          one more worker is started each time the center has seen so many samples
    """

    address: str | None = None
    namespace: str | None = None
    worker_cores: float = 1.0
    server_cores: float = 1.0
    worker_resources: Mapping[str, float] = field(default_factory=dict)
    server_resources: Mapping[str, float] = field(default_factory=dict)
    server_node: str | None = None
    spread: bool = True
    object_store_bytes: int | None = None
    log_to_driver: bool = False
    late: Sequence[int] = ()

    def __post_init__(self) -> None:
        for name in ("worker_cores", "server_cores"):
            not_negative(name, getattr(self, name))

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "Options":
        """Raises `UsageError` for one that is not there."""
        unknown = sorted(set(options) - set(cls.__dataclass_fields__))
        if unknown:
            raise UsageError(unknown[0], "the ray backend has no such option")
        return cls(**options)


def library() -> Any:
    """Ray; raises `MissingLibraryError`."""
    try:
        import ray
    except ImportError as error:
        raise MissingLibraryError("ray", "pip install 'dovetail[ray]'") from error
    return ray


@contextmanager
def connected(options: Options, workers: int) -> Iterator[Any]:
    """Ray, connected to the cluster. One that was started here ends with the block, as does a
    connection made here; one that the caller had made before stays."""
    local = options.address is None
    path = os.pathsep.join(name or os.getcwd() for name in sys.path)
    with _environment(_LOCAL | {"PYTHONPATH": path} if local else {}):
        ray = library()
        ours = not ray.is_initialized()
        if ours:
            with _loopback() if local else nullcontext():
                ray.init(**_arguments(options, workers))
    try:
        if ours and local:
            _check_loopback(ray)
        yield ray
    finally:
        if ours:
            ray.shutdown()


@contextmanager
def _loopback() -> Iterator[None]:
    """Ray reads its setting when it is imported, which may have been before."""
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _check_loopback(ray: Any) -> None:
    """Other versions of Ray may not know the setting."""
    found = sorted({str(node["NodeManagerAddress"]) for node in ray.nodes()})
    if found != [_LOOPBACK]:
        raise UsageError(
            "address",
            f"this version of Ray listens on {', '.join(found)}, beyond this machine; start it "
            "as you see fit, and give its address",
        )


def _arguments(options: Options, workers: int) -> dict[str, Any]:
    known = {"log_to_driver": options.log_to_driver, "configure_logging": False}
    if options.address is not None:
        return known | {"address": options.address}
    here = {**options.worker_resources}
    for name, amount in options.server_resources.items():
        here[name] = here.get(name, 0) + amount
    count = workers + len(options.late)
    return known | {
        "address": "local",  # a new one, though there may be another on this machine
        "include_dashboard": False,
        "num_cpus": max(1, round(count * options.worker_cores + options.server_cores + 0.5)),
        "resources": {name: amount * count for name, amount in here.items()} or None,
        "object_store_memory": options.object_store_bytes,
    }


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """What processes that are started now see."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
