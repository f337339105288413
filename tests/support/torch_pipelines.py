"""Runs exported stages by torch.distributed.pipelining, a process for each rank, on gloo."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class


class Decoder(nn.Module):
    """As models of torchtitan are written: what another stage holds is None, or not in its list."""

    def __init__(self, layers=5, tied=False):
        super().__init__()
        self.embedding = nn.Linear(8, 8, bias=False)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 8, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x):
        x = self.embedding(x) if self.embedding is not None else x
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x) if self.norm is not None else x
        return self.head(x) if self.head is not None else x


def part_of(model, names):
    """The stage as torchtitan makes it: lists keep what is named below them, all else is kept by
    its own name."""
    part, kept = copy.deepcopy(model), set(names)
    for name, child in list(part.named_children()):
        if isinstance(child, nn.ModuleList):
            numbers = [int(k.split(".")[1]) for k in kept if k.startswith(f"{name}.")]
            setattr(part, name, nn.ModuleList(child[n] for n in sorted(numbers)))
        elif name not in kept:
            setattr(part, name, None)
    return part


@dataclass(frozen=True)
class PipelineCase:
    """options   what is exported for torchtitan
    points    split points; empty: stages are those of torchtitan
    """

    options: dict[str, Any]
    points: dict[str, str]


def run_rank(rank, meet, model, batch, cases, results):
    """Puts (case, stage, gradients of its parameters in order) of the stages of this rank."""
    torch.set_num_threads(1)
    ranks = cases[0].options["pipeline_parallel_degree"]
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks)
    device, (inputs, targets) = torch.device("cpu"), batch
    for number, case in enumerate(cases):
        parts, size = case.options["module_fqns_per_model_part"], case.options[
            "pipeline_parallel_microbatch_size"
        ]  # fmt: skip
        mine = range(rank, len(parts), ranks)
        if case.points:
            points = {path: SplitPoint[name] for path, name in case.points.items()}
            pipe = pipeline(copy.deepcopy(model), mb_args=(inputs[:size],), split_spec=points)
            stages = [pipe.build_stage(stage, device) for stage in mine]
        else:
            stages = [
                PipelineStage(part_of(model, parts[stage]), stage, len(parts), device)
                for stage in mine
            ]
        made = get_schedule_class(case.options["pipeline_parallel_schedule"])
        schedule = made(
            stages if issubclass(made, PipelineScheduleMulti) else stages[0],
            n_microbatches=len(inputs) // size,
            loss_fn=nn.functional.mse_loss,
        )
        schedule.step(*[inputs] * (rank == 0), target=targets)
        for stage in stages:
            gradients = [p.grad.numpy() for p in stage.submod.parameters()]
            results.put((number, stage.stage_index, gradients))
    dist.barrier()
    dist.destroy_process_group()
