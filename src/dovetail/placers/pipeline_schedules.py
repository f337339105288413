"""Orders of work in a pipeline of stages over micro-batches, and what a step of them takes.

A device works through *tasks*: F, a stage's forward ops on one micro-batch, and B, its backward
ops. Zero-bubble schedules cut B in two: I makes the gradients that other stages wait for, and W the
gradients of the parameters, which nobody waits for. Time goes to the right, one row a device:

    gpipe        F0 F1 F2 F3                B0 B1 B2 B3
                    F0 F1 F2 F3          B0 B1 B2 B3
                       F0 F1 F2 F3    B0 B1 B2 B3

    1f1b         F0 F1 F2          B0 F3 B1    B2    B3
                    F0 F1       B0 F2 B1 F3 B2    B3
                       F0    B0 F1 B1 F2 B2 F3 B3

Papers:
* gpipe: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
  Parallelism", NeurIPS 2019, https://arxiv.org/abs/1811.06965, section 2.3.
* 1f1b: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019,
  https://arxiv.org/abs/1806.03377, section 3.2, with one flush a step, as in "Efficient Large-Scale
  Language Model Training on GPU Clusters Using Megatron-LM", SC 2021,
  https://arxiv.org/abs/2104.04473, section 2.2.1.
* interleaved: the latter, section 2.2.2: a device has several stages.
* zero-bubble: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024,
  https://arxiv.org/abs/2401.10241, section 2.2, ZB-H1: the peak memory of 1F1B; and with more.

Differences: backward tasks of gpipe run in the order of the micro-batches, as in
torch.distributed.pipelining, so that gradients are summed in that order. interleaved takes any
number of micro-batches. Stages need not take equally long, so zero-bubble takes for each device, in
the order of time, the task that can start first, where at most S micro-batches wait for W, as many
as the first of S stages holds in 1f1b; where memory lasts, more: ZB-H2 has 2 S - 1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dovetail.runtime.compiling import kernel

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

F, B, I, W = range(4)  # noqa: E741  the papers' letters
"""Kinds of tasks. B is I and then W."""


class Task(NamedTuple):
    """One stage's work of one kind on one micro-batch."""

    kind: int
    stage: int
    micro: int

    def __str__(self) -> str:
        """Return the task as torch.distributed.pipelining writes it, such as "2F0"."""
        return f"{self.stage}{'FBIW'[self.kind]}{self.micro}"


Orders = list[list[Task]]
"""[devices] the tasks of each device in running order."""


@dataclass(frozen=True, eq=False)
class PipelineTimes:
    """What stages take, in seconds.

    forward, inputs, weights   [stages] of the tasks F, I and W on the stage's device
    updates                    [devices] the updates after the last micro-batch
    sends, returns             [stages, stages] a transfer of activations from an earlier stage to a
                               later one, and of gradients from a later one to an earlier one; nan:
                               nothing is sent, and 0 within a device
    channels                   [stages, stages] the channel from the first stage's device to the
                               second's; -1 within a device
    devices                    [stages] the device of each
    """

    forward: Float64
    inputs: Float64
    weights: Float64
    updates: Float64
    sends: Float64
    returns: Float64
    channels: Int64
    devices: Int64

    @property
    def stages(self) -> int:
        return len(self.forward)


# --- Orders ---


def orders_of(
    schedule: str, times: PipelineTimes, micro_batches: int, held: tuple[int, ...] = ()
) -> Orders:
    """Return the tasks of each device in the order of a schedule. Raises `KeyError`.

    held   [stages] of zero-bubble: how many micro-batches each may hold; (): as many as there are
           stages
    """
    make = SCHEDULES[schedule]
    return make(times, micro_batches, held) if held else make(times, micro_batches)


def gpipe(times: PipelineTimes, micro_batches: int) -> Orders:
    """All forward tasks, then all backward tasks."""
    orders: Orders = [[] for _ in times.updates]
    for kind in (F, B):
        for micro in range(micro_batches):
            stages = range(times.stages) if kind == F else reversed(range(times.stages))
            for stage in stages:
                orders[times.devices[stage]].append(Task(kind, stage, micro))
    return orders


def one_forward_one_backward(times: PipelineTimes, micro_batches: int) -> Orders:
    """Stage s of S begins with S - s forward tasks, and then takes a backward and a forward task in
    turn."""
    orders: Orders = [[] for _ in times.updates]
    for stage, device in enumerate(times.devices.tolist()):
        ahead = min(micro_batches, times.stages - stage)
        orders[device] += _alternating(
            [Task(F, stage, micro) for micro in range(micro_batches)],
            [Task(B, stage, micro) for micro in range(micro_batches)],
            ahead,
        )
    return orders


def interleaved(times: PipelineTimes, micro_batches: int) -> Orders:
    """Each device takes its stages for about as many micro-batches as there are devices, one stage
    after another, and goes on with the next ones; after a while in turn with backward tasks."""
    used = list(dict.fromkeys(times.devices.tolist()))
    orders: Orders = [[] for _ in times.updates]
    # As even as can be, and none with fewer micro-batches than devices where there are as many: a
    # device would begin its next stage before the one before has passed the micro-batch on.
    windows = np.array_split(np.arange(micro_batches), max(1, micro_batches // len(used)))
    longest = len(windows[0])
    for rank, device in enumerate(used):
        chunks = np.flatnonzero(times.devices == device).tolist()
        forward, backward = [], []
        for window in windows:
            micros = window.tolist()
            forward += [Task(F, stage, micro) for stage in chunks for micro in micros]
            backward += [Task(B, stage, micro) for stage in reversed(chunks) for micro in micros]
        # Megatron-LM's number of forward tasks before the first backward task.
        ahead = (len(chunks) - 1) * longest + 2 * (len(used) - rank - 1) + 1
        orders[device] = _alternating(forward, backward, min(ahead, len(forward)))
    return orders


def zero_bubble(times: PipelineTimes, micro_batches: int, held: tuple[int, ...] = ()) -> Orders:
    """W fills the gaps of 1f1b. `held` [stages] micro-batches at most wait for W; (): on each stage
    as many as the first one of 1f1b holds. Of several ways to fill them the one with the shortest
    step; ties: the first."""
    stages = times.stages
    preferences = [{I: 0, F: 1, W: 2}, {I: 0, W: 1, F: 2}, {F: 0, I: 1, W: 2}]
    furthest = [0, 1, stages // 2]
    if held:
        # The other ways were never the shortest for GPT-2 medium then.
        preferences, furthest = preferences[:1], [stages // 2, stages - 1, stages]
    ways = [
        _filled(times, micro_batches, preference, ahead, held or (stages,) * stages)
        for preference in preferences
        for ahead in dict.fromkeys(furthest)
    ]
    return min(ways, key=lambda orders: step_seconds(orders, times, micro_batches))


def other_held(room: Float64, micro_batches: int) -> list[tuple[int, ...]]:
    """Return what stages of zero-bubble may hold where 1f1b's memory is not what there is.

    room   [stages] for so many micro-batches each device has memory, as it is estimated
    """
    stages = len(room)
    most = (stages + 1, stages + stages // 2, 2 * stages - 1, 3 * stages, micro_batches)
    options = [
        tuple(int(min(max(1.0, share * own), held)) for own in room)
        for held in most
        for share in (1e9, 1.5, 1.0, 0.7)
        if held <= micro_batches
    ]
    return list(dict.fromkeys(options))


def _filled(
    times: PipelineTimes,
    micro_batches: int,
    preference: dict[int, int],
    ahead: int,
    held: tuple[int, ...],
) -> Orders:
    """Return the orders in which each device takes, of the tasks that can start first, the one with
    the least preference number. F is at most S - s + `ahead` tasks ahead of I on stage s, and
    held[s] tasks ahead of W."""
    count = times.stages
    orders: Orders = [[] for _ in times.updates]
    done = {kind: np.zeros(count, dtype=np.int64) for kind in (F, I, W)}
    arrived = {kind: np.full((count, micro_batches), np.inf) for kind in (F, I)}
    missing = {
        F: np.repeat((~np.isnan(times.sends)).sum(axis=0)[:, None], micro_batches, axis=1),
        I: np.repeat((~np.isnan(times.returns)).sum(axis=0)[:, None] + 1, micro_batches, axis=1),
    }
    latest = {kind: np.zeros((count, micro_batches)) for kind in (F, I)}
    arrived[F][missing[F] == 0] = 0.0
    free = np.zeros(len(times.updates))
    channels: dict[int, float] = {}

    def arrive(kind: int, stage: int, micro: int, at: float) -> None:
        latest[kind][stage, micro] = max(latest[kind][stage, micro], at)
        missing[kind][stage, micro] -= 1
        if missing[kind][stage, micro] == 0:
            arrived[kind][stage, micro] = latest[kind][stage, micro]

    for _ in range(3 * count * micro_batches):
        # What may come next: (start, preference, device, kind, stage).
        options: list[tuple[float, int, int, int, int]] = []
        for stage, device in enumerate(times.devices.tolist()):
            forward, inputs, weights = (int(done[kind][stage]) for kind in (F, I, W))
            since: dict[int, float] = {}
            if inputs < micro_batches:
                since[I] = arrived[I][stage, inputs]
            within = forward - inputs < count - stage + ahead and forward - weights < held[stage]
            if forward < micro_batches and within:
                since[F] = arrived[F][stage, forward]
            if weights < inputs:
                since[W] = 0.0
            options += [
                (max(free[device], at), preference[kind], device, kind, stage)
                for kind, at in since.items()
                if at < np.inf
            ]
        if not options:
            break
        start, _, device, kind, stage = min(options)
        micro = int(done[kind][stage])
        done[kind][stage] += 1
        orders[device].append(Task(kind, stage, micro))
        seconds = {F: times.forward, I: times.inputs, W: times.weights}[kind][stage]
        end = free[device] = start + seconds
        if kind == W:
            continue
        if kind == F:
            arrive(I, stage, micro, end)
        sent = (times.sends if kind == F else times.returns)[stage]
        for target in np.flatnonzero(~np.isnan(sent)).tolist():
            at, channel = end, int(times.channels[stage, target])
            if channel >= 0:
                at = channels[channel] = max(channels.get(channel, 0.0), end) + sent[target]
            arrive(kind, target, micro, at)
    return orders


def _alternating(forward: list[Task], backward: list[Task], ahead: int) -> list[Task]:
    """So many forward tasks, then a backward and a forward task in turn, then the rest."""
    tasks = forward[:ahead]
    for index, task in enumerate(backward):
        tasks.append(task)
        tasks += forward[ahead + index : ahead + index + 1]
    return tasks


SCHEDULES: dict[str, Callable[..., Orders]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
}
"""Name -> the function of times and micro-batches that orders the tasks of all devices."""


def in_flight(schedule: str, stage: int, stages: int, devices: int, micro_batches: int) -> int:
    """Return the most micro-batches whose activations a stage holds at once."""
    if schedule == "gpipe":
        return micro_batches
    if schedule == "interleaved":
        ahead = stages - devices + 2 * (devices - stage % devices - 1) + 1
        # The stages of a device share these forward tasks; its first stage has the most.
        return min(micro_batches, -(-ahead // max(stages // devices, 1)) + devices // 2)
    return min(micro_batches, stages if schedule == "zero-bubble" else stages - stage)


# --- Seconds of a step ---


def step_seconds(orders: Orders, times: PipelineTimes, micro_batches: int) -> float:
    """Return the seconds of a step in which every task is one piece of work and sends at its end;
    inf if the orders cannot complete.

    A channel serves one transfer at a time. This is what the search compares; the value of a plan
    is simulated op by op.
    """
    longest = max(map(len, orders), default=0)
    table = np.full((len(orders), longest, 3), -1, dtype=np.int64)
    for device, tasks in enumerate(orders):
        if tasks:
            table[device, : len(tasks)] = tasks
    lengths = np.array([len(tasks) for tasks in orders], dtype=np.int64)
    backward = times.inputs + times.weights
    seconds = np.stack([times.forward, backward, times.inputs, times.weights])
    count = times.stages
    channels = int(times.channels.max(initial=-1)) + 1
    return float(
        _simulate(
            table, lengths, seconds, times.updates, times.sends, times.returns, times.channels,
            np.zeros((2, count, micro_batches)), np.zeros((2, count, micro_batches), np.int64),
            np.zeros(len(orders)), np.zeros(len(orders), np.int64), np.zeros(channels),
        )
    )  # fmt: skip


@kernel
def _simulate(  # noqa: PLR0917  one loop over tasks in the order of time
    table: Int64,
    lengths: Int64,
    seconds: Float64,
    updates: Float64,
    sends: Float64,
    returns: Float64,
    channels: Int64,
    arrivals: Float64,
    missing: Int64,
    free: Float64,
    nexts: Int64,
    channel_free: Float64,
) -> float:
    """Seconds of a step. `arrivals` and `missing` are [F or B, stages, micro-batches]: when the
    last input came, and how many are yet to come."""
    stages, micro_batches = arrivals.shape[1], arrivals.shape[2]
    for stage in range(stages):
        before = after = 0
        for other in range(stages):
            before += not np.isnan(sends[other, stage])
            after += not np.isnan(returns[other, stage])
        for micro in range(micro_batches):
            missing[0, stage, micro] = before
            missing[1, stage, micro] = after + 1
    left = lengths.sum()
    while left > 0:
        best, chosen = np.inf, -1
        for device in range(len(lengths)):
            if nexts[device] == lengths[device]:
                continue
            kind, stage, micro = table[device, nexts[device]]
            start = free[device]
            if kind < 3:
                row = 0 if kind == 0 else 1
                if missing[row, stage, micro] > 0:
                    continue
                start = max(start, arrivals[row, stage, micro])
            if start < best:
                best, chosen = start, device
        if chosen < 0:
            return np.inf
        kind, stage, micro = table[chosen, nexts[chosen]]
        nexts[chosen] += 1
        left -= 1
        end = best + seconds[kind, stage]
        free[chosen] = end
        if kind == 3:
            continue
        if kind == 0:
            arrivals[1, stage, micro] = max(arrivals[1, stage, micro], end)
            missing[1, stage, micro] -= 1
        for target in range(stages):
            taken = sends[stage, target] if kind == 0 else returns[stage, target]
            if np.isnan(taken):
                continue
            at = end
            channel = channels[stage, target]
            if channel >= 0:
                at = channel_free[channel] = max(channel_free[channel], end) + taken
            row = 0 if kind == 0 else 1
            arrivals[row, target, micro] = max(arrivals[row, target, micro], at)
            missing[row, target, micro] -= 1
    longest = 0.0
    for device in range(len(lengths)):
        longest = max(longest, free[device] + updates[device])
    return longest
