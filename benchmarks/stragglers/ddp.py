"""torch DistributedDataParallel (gloo, loopback) on the workload: one process a worker.

python benchmarks/stragglers/ddp.py RANK STORE < runs.json     rank 0 prints a line of JSON a run

Rank 0 keeps a copy of the parameters every few steps, with the time; they are evaluated afterwards,
as on the other side, so that nobody waits for an evaluation.
"""

import json
import math
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workload import (
    BATCH,
    WORKERS,
    Run,
    adam,
    compute_seconds,
    digits,
    network,
    time_to_target,
    wait_a_step,
)

KEEP_STEPS = 4


def train(run: Run, rank: int, computed_seconds: float) -> float:
    """Seconds to the target; each epoch is split among the workers as DistributedSampler does."""
    images, labels, *_ = digits()
    model = DistributedDataParallel(network(run.seed))
    optimizer = adam(model.parameters(), run.rate)
    steps, epoch, found = 0, 0, math.inf
    over = torch.zeros(1)
    dist.barrier()
    begin = time.perf_counter()
    while not over:
        kept = []
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        mine = order[rank : len(order) // WORKERS * WORKERS : WORKERS]
        for batch in mine.split(BATCH):
            wait_a_step(run.slow if rank == 0 else 1.0, computed_seconds)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            steps += 1
            if rank == 0 and steps % KEEP_STEPS == 0:
                theta = nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
                kept.append((time.perf_counter() - begin, theta))
        epoch += 1
        pause = time.perf_counter()  # not counted: nobody trains meanwhile
        if rank == 0:
            found = time_to_target(kept)
            over[0] = float(found < math.inf or pause - begin > run.seconds)
        dist.broadcast(over, 0)
        begin += time.perf_counter() - pause
    return found


def main() -> None:
    rank, store = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORKERS)
    computed_seconds = compute_seconds()
    for record in json.load(sys.stdin):
        seconds = train(Run(**record), rank, computed_seconds)
        if rank == 0:
            print(json.dumps(None if seconds == math.inf else seconds), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
