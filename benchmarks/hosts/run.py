"""Plans on hosts that are network namespaces of this machine: predicted beside measured.

    namespace 0 (core 0) ── veth ──┐
    namespace 1 (core 1) ── veth ──┴── bridge, in a namespace of its own

Each host's outgoing link is shaped by `tc`: its bandwidth (tbf), and its delay (netem) where the
kernel has that. The links are measured as a user
would, by `dovetail machine --hosts`, networks are planned for that machine, and each plan is run
several times. Measured is the step as the devices ran it, the median of each run's three stamped
steps; the call around it, with outputs for all ranks, stands beside it. Needs root, `ip` and `tc`;
without them it says so and does nothing.

    python benchmarks/hosts/run.py --rate 500mbit [--delay 1ms]
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import parser_of

PREFIX, NETWORK, PORT = "dovetail", "10.77.0", 29717
PLANS = (
    ("zoo:rnnlm?layers=2&hidden=256&steps=8&batch=16&vocabulary=1000", "", "expert"),
    ("zoo:rnnlm?layers=2&hidden=256&steps=8&batch=16&vocabulary=1000", "sgd", "expert"),
    ("zoo:inception_v3?width=0.25&size=149&batch=2", "", "balanced"),
    ("zoo:inception_v3?width=0.25&size=149&batch=2", "", "etf"),
    ("zoo:inception_v3?width=0.25&size=149&batch=2", "sgd", "balanced"),
)
"""(model, optimizer of a training step or "", placer) of each plan."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def why_not() -> str:
    """Why namespaces cannot be made here; "" if they can."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no {tool}"
    if os.geteuid() != 0:
        return "it needs root"
    tried = subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else "network namespaces are not permitted"


class Namespaces:
    """So many hosts behind a bridge; a context manager that takes all of it away again."""

    def __init__(self, hosts: int, delay: str, rate: str) -> None:
        self.names = [f"{PREFIX}-{number}" for number in range(hosts)]
        self.hub = f"{PREFIX}-hub"
        self.delay = delay
        # Few bytes may go faster, so that small messages are slowed down as large ones are.
        self.rate = ["tbf", "rate", rate, "burst", "16kb", "latency", "400ms"]

    def __enter__(self) -> "Namespaces":
        try:
            self._build()
        except subprocess.CalledProcessError as error:
            self.__exit__()
            raise SystemExit(f"the kernel cannot do this: {' '.join(error.cmd)}") from None
        return self

    def _build(self) -> None:
        ip("netns", "add", self.hub)
        ip("-n", self.hub, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.hub, "link", "set", "bridge", "up")
        for number, name in enumerate(self.names):
            ip("netns", "add", name)
            inner, outer = "eth0", f"port{number}"
            ends = [inner, "netns", name, "type", "veth", "peer", outer, "netns", self.hub]
            ip("link", "add", *ends)
            ip("-n", self.hub, "link", "set", outer, "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"{NETWORK}.{number + 1}/24", "dev", inner)
            ip("-n", name, "link", "set", inner, "up")
            ip("-n", name, "link", "set", "lo", "up")
            shape = ["netns", "exec", name, "tc", "qdisc", "add", "dev", inner]
            ip(*shape, "root", "handle", "1:", *self.rate)
            if self.delay:
                ip(*shape, "parent", "1:1", "netem", "delay", self.delay, "limit", "100000")

    def __exit__(self, *_: object) -> None:
        for name in (*self.names, self.hub):
            subprocess.run(["ip", "netns", "del", name], check=False)

    def dovetail(self, *words: str) -> str:
        """What rank 0 prints, when a rank in each namespace runs the command."""
        cores = sorted(os.sched_getaffinity(0))
        ranks = []
        for rank, name in enumerate(self.names):
            core = str(cores[rank % len(cores)])
            variables = {
                "RANK": str(rank), "WORLD_SIZE": str(len(self.names)), "LOCAL_RANK": "0",
                "MASTER_ADDR": f"{NETWORK}.1", "MASTER_PORT": str(PORT),
                "DOVETAIL_HOST": f"host{rank}",
            }  # fmt: skip
            command = ["ip", "netns", "exec", name, "taskset", "-c", core, sys.executable]
            ranks.append(
                subprocess.Popen(
                    [*command, "-m", "dovetail", *words],
                    env=os.environ | variables,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        ends = [rank.communicate(timeout=600) for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise SystemExit("\n".join(errors for _, errors in ends))
        return ends[0][0]


def main() -> None:
    """Print a row for each plan."""
    parser = parser_of(__doc__, runs=7, steps=30)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--delay", default="", help="of each packet, one way; needs netem")
    parser.add_argument("--rate", default="500mbit", help="of each host's outgoing link")
    options = parser.parse_args()
    if reason := why_not():
        print(f"skipped: hosts are network namespaces here, and {reason}")
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        Namespaces(options.hosts, options.delay, options.rate) as hosts,
    ):
        machine, plan = Path(folder, "hosts.toml"), Path(folder, "plan.json")
        print(hosts.dovetail("machine", "--hosts", "--out", str(machine)))
        for model, train, placer in PLANS:
            words = ["--train", train] if train else []
            subprocess.run(
                [
                    sys.executable, "-m", "dovetail", "plan", model, *words, "--placer", placer,
                    "--machine", str(machine), "--no-compile", "--budget", "5s", "--min-gain", "0",
                    "--out", str(plan),
                ],
                check=True, capture_output=True, env=os.environ | {"DOVETAIL_HOST": "host0"},
            )  # fmt: skip
            words = ["run", str(plan), "--json", "--steps", str(options.steps)]
            runs = [json.loads(hosts.dovetail(*words)) for _ in range(options.runs)]
            measured = [run["devices_seconds"] for run in runs]
            predicted, middle = runs[0]["predicted_seconds"], statistics.median(measured)
            call = statistics.median(run["median_seconds"] for run in runs)
            step = f"training by {train}" if train else "inference"
            print(
                f"{model} {step}, {placer}: predicted {1e3 * predicted:.2f} ms, measured "
                f"{1e3 * middle:.2f} ms ({1e3 * min(measured):.2f} to {1e3 * max(measured):.2f}), "
                f"{100 * (predicted / middle - 1):+.1f} %; the call {1e3 * call:.2f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
