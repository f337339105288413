"""Loops of a user's own, for ranks: each case trains a small network and returns its parameters."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

import dovetail as dt

ROOT = Path(__file__).parents[2]
STEPS = 7


def a_network(seed=0):
    """Two groups' worth of parameters, of which one is frozen and one is tied."""
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    network[2].weight = network[0].weight
    # Nobody sends what is not trained, so it must be the same on all ranks.
    nn.init.constant_(network[2].bias, 0.1).requires_grad_(False)
    return network


def groups(network):
    """Weights with decay and biases without, at another rate."""
    named = list(network.named_parameters())
    return [
        {"params": [p for name, p in named if "weight" in name], "weight_decay": 0.1},
        {"params": [p for name, p in named if "bias" in name], "lr": 0.03},
    ]


def batches(rank, steps=STEPS):
    draw = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(4, 6, generator=draw) for _ in range(steps)]


def values(network):
    return torch.cat([p.detach().flatten() for p in network.parameters()]).tolist()


def train(network, optimizer, data, scheduler=None):
    for inputs in data:
        optimizer.zero_grad()
        network(inputs).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def adamw(network):
    return torch.optim.AdamW(groups(network), lr=0.01)


def with_rule(rank, rule, make=adamw, *, steps=STEPS, **settings):
    """The parameters after training by a rule; ranks begin with weights of their own."""
    network = a_network(seed=rank)
    optimizer = dt.Optimizer(make(network), rule, **settings)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    train(network, optimizer, batches(rank, steps), scheduler)
    optimizer.finish()
    return values(network)


def with_ddp(rank, make=adamw):
    """The parameters after training by torch's own data parallelism, in a process group."""
    from torch.nn.parallel import DistributedDataParallel

    network = a_network(seed=rank)
    optimizer = make(network)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    train(DistributedDataParallel(network), optimizer, batches(rank), scheduler)
    return values(network)


def environment(**variables):
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return inherited | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | variables


class Ranks:
    """Starts the ranks of a program without torchrun, which would kill all when one ends."""

    def __init__(self, ranks, text):
        # torchrun keeps the store in a process of its own, too.
        self.store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)
        variables = {
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", text],
                env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **variables),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
            process.communicate()

    def ends(self):
        """(exit status, standard output, last line of standard error) of each rank."""
        ends = []
        for process in self.processes:
            out, errors = process.communicate(timeout=240)
            ends.append((process.returncode, out, (errors.splitlines() or [""])[-1]))
        return ends

    def results(self):
        """What each rank has printed last, as JSON."""
        ends = self.ends()
        assert [status for status, _, _ in ends] == [0] * len(ends), ends
        return [json.loads(out.splitlines()[-1]) for _, out, _ in ends]


def program(body):
    """A program of the ranks: `rank` and all of this module are there."""
    return (
        "import json, os, signal, sys, time, torch\nimport dovetail as dt\n"
        "from tests.support.own_loops import *\n"
        "rank = int(os.environ.get('RANK', 0))\n" + body
    )
