"""A planned pipeline on this machine's cores beside torch.distributed.pipelining on gloo.

    python benchmarks/pipelines/measured.py [--stages 2] [--rounds 9] [--steps 10]

Both have the same stages, schedule, micro-batches and optimizer (SGD), and one core a stage; with
more stages than cores, stages share these. Rounds of each take turns in one run; a ratio above 1
says that ours makes more steps a second. The losses of both are compared first.
"""

import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from dataclasses import replace
from itertools import permutations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from harness import host, keep_json, parser_of, ratios_of
from torch import Tensor, nn

import dovetail as dt
from dovetail.executors import run
from dovetail.frontends import SGD, Captured, capture
from dovetail.machine import Machine
from dovetail.pipeline import resolve_machine
from dovetail.pipeline.opening import planned
from dovetail.plans import Plan

HERE = Path(__file__).parent
WIDTH, TOKENS, BLOCKS, MICRO_BATCHES, RATE = 256, 256, 8, 8, 0.01
SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self, count: int = BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def network() -> Blocks:
    torch.manual_seed(0)
    return Blocks()


def batches() -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(1)
    return tuple([torch.randn(TOKENS, WIDTH) for _ in range(MICRO_BATCHES)] for _ in range(2))


def torch_rank(rank: int, stages: int, port: int, schedule: str, pipe) -> None:
    """One rank of torch's pipeline: for each number that comes it makes so many steps, and answers
    with (seconds, last loss)."""
    from torch.distributed.pipelining import PipelineStage, schedules

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=stages)
    each = BLOCKS // stages
    part = Blocks(0)
    part.blocks = network().blocks[rank * each : (rank + 1) * each]
    stage = PipelineStage(part, rank, stages, torch.device("cpu"))
    make = getattr(schedules, SCHEDULES[schedule])
    pipeline = make(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(part.parameters(), lr=RATE)
    inputs, targets = (torch.cat(parts) for parts in batches())
    while count := pipe.recv():
        torch.distributed.barrier()
        began, losses = time.perf_counter(), []
        for _ in range(count):
            losses = []
            optimizer.zero_grad()
            if rank == 0:
                pipeline.step(inputs)
            elif rank == stages - 1:
                pipeline.step(target=targets, losses=losses)
            else:
                pipeline.step()
            optimizer.step()
        torch.distributed.barrier()
        loss = statistics.fmean(float(loss.detach()) for loss in losses) if losses else 0.0
        pipe.send((time.perf_counter() - began, loss))


class TorchPipeline:
    def __init__(self, stages: int, schedule: str) -> None:
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            port = listening.getsockname()[1]
        spawning = multiprocessing.get_context("spawn")
        self.pipes = []
        for rank in range(stages):
            mine, theirs = spawning.Pipe()
            arguments = (rank, stages, port, schedule, theirs)
            spawning.Process(target=torch_rank, args=arguments, daemon=True).start()
            self.pipes.append(mine)

    def steps(self, count: int) -> tuple[float, float]:
        """(seconds, last loss) of so many steps."""
        for pipe in self.pipes:
            pipe.send(count)
        answers = [pipe.recv() for pipe in self.pipes]
        return max(seconds for seconds, _ in answers), answers[-1][1]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(0)


def machine_of(stages: int) -> Machine:
    """A device of a core for each stage. Where there are not enough, several have the same core."""
    cores = len(os.sched_getaffinity(0))
    here = resolve_machine(f"here/{min(stages, cores)}")
    if stages <= cores:
        return here
    devices = tuple(
        replace(here.devices[number % cores], name=f"cpu{number}") for number in range(stages)
    )
    one = here.links[0]
    links = tuple(
        replace(one, source=a.name, destination=b.name, channel=f"{a.name}->{b.name}")
        for a, b in permutations(devices, 2)
    )
    return replace(here, devices=devices, links=links)


def planned_for(step: Captured, machine: Machine, **options) -> Plan:
    """The step's plan. Costs are measured if each device has a core of its own; else they are those
    of a data sheet, which decide nothing, as stages are pinned."""
    cores = [core for device in machine.devices for core in device.cores]
    if len(set(cores)) == len(cores):
        return dt.plan(step, machine, **options)
    nowhere = tuple(replace(device, cores=()) for device in machine.devices)
    plan = dt.plan(step, replace(machine, devices=nowhere), **options)
    return replace(plan, machine=machine)


def compare(stages: int, schedule: str, rounds: int, steps: int) -> dict:
    inputs, targets = batches()
    step = capture(
        network(), inputs[0], targets=(targets[0],), loss=nn.functional.mse_loss, train=SGD(lr=RATE)
    )
    each = BLOCKS // stages
    pins = [(f"blocks.{i}", f"cpu{i // each}") for i in range(BLOCKS)]
    plan = planned_for(
        step, machine_of(stages), micro_batches=MICRO_BATCHES, schedule=schedule, pins=pins,
        recompute="never", budget="5s",
    )  # fmt: skip
    peer = TorchPipeline(stages, schedule)
    ours, theirs = [], []
    with run(plan, planned(plan, step)) as running:
        losses = [(float(running.step(*inputs, *targets)), peer.steps(1)[1]) for _ in range(3)]
        for a, b in losses:
            assert abs(a - b) < 1e-5 * abs(b), losses
        for _ in range(rounds):
            began = time.perf_counter()
            for _ in range(steps):
                running.step(*inputs, *targets)
            ours.append((time.perf_counter() - began) / steps)
            theirs.append(peer.steps(steps)[0] / steps)
    peer.close()
    ratios = ratios_of(theirs, ours)
    row = {
        "stages": stages, "schedule": schedule, "predicted": plan.value,
        "ours": statistics.median(ours), "torch": statistics.median(theirs),
        "ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios),
    }  # fmt: skip
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = parser_of(__doc__, rounds=9, steps=10)
    parser.add_argument("--stages", type=int, default=2)
    arguments = parser.parse_args()
    rows = [
        compare(arguments.stages, schedule, arguments.rounds, arguments.steps)
        for schedule in SCHEDULES
    ]
    out = HERE / "results" / f"measured_{arguments.stages}.json"
    keep_json(out, {"host": host(torch), "rows": rows})


if __name__ == "__main__":
    main()
