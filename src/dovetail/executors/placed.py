"""Runs a loaded plan: parameters lie in shared memory or on GPUs, and the devices' processes run
the steps.

    parent                   shared block                       worker of a device
    step(*inputs) ─ copy ──► inputs                             reads its sources in place
                             parameters, state ◄─ updated ───── by the device they live on
                             slots and flags   ◄─────────────►  between devices
    result ◄─────── copy ─── outputs           ◄─ copied ────── after the step

A step on all cores as one device is run by this process itself (`executors.workers`). Where others
run it, this process copies on one thread and ends OpenMP's, so that none spins on their cores.
Such a step can work in place: on the module's own parameters and buffers, on inputs as they are
given, and its results are handed over as they are made. Only what lies otherwise in memory than the
step reads it is copied, and results that share memory with something else.

This process reads and writes parameters only between steps, so that `state_dict` needs no help of
the workers. Sources that live on GPUs are copied from the block when a plan is loaded, and into it
when they are asked for.
"""

import copy
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dovetail.errors import (
    DovetailError,
    OutOfMemoryError,
    PeerLostError,
    ProcessDiedError,
    ProcessError,
    RunError,
    UsageError,
    WorkerDiedError,
    WorkerError,
)
from dovetail.executors.gpus.peers import PeerPair
from dovetail.executors.gpus.steps import steps_of
from dovetail.executors.gpus.worker import LoadGpus
from dovetail.executors.hosts import Bridge, HostPart
from dovetail.executors.loaded import LoadedStep, StateName, check_fits
from dovetail.executors.shares import Share, most_bytes, share_out, tensor_at
from dovetail.executors.timelines import progress_of, timeline_of
from dovetail.executors.worker import Failed, Load
from dovetail.executors.workers import DeviceWorker, Workers
from dovetail.frontends.instructions import AwaitFlag, BlockSlot, SendTensor
from dovetail.frontends.interpret import held_values, source_value
from dovetail.frontends.plain import ordinary_result
from dovetail.frontends.program import Call, Captured, Ref, distinct_refs
from dovetail.frontends.runners import distinct
from dovetail.frontends.structures import substitute
from dovetail.graph import EVERYWHERE
from dovetail.machine.local import available_bytes
from dovetail.plans import Plan, check
from dovetail.runtime.neighbours import Neighbours
from dovetail.runtime.processes import Worker, ready
from dovetail.runtime.ranks import RankPlace, Ranks
from dovetail.runtime.setup import op_threads, rest_openmp
from dovetail.runtime.shared import Block
from dovetail.runtime.waiting import address_of, publish
from dovetail.timeline import Timeline

DRAIN_SECONDS = 10.0
"""After a failed step, borrowed workers have this long to answer before they are killed."""


class PlacedNetwork(LoadedStep):
    """A loaded plan, ready to run steps. `executors.run` makes it.

    On several ranks all call the same methods in the same order. Rank 0's tensors count; the others
    give tensors of the same shapes, whose values are not read. All return rank 0's results, but
    state is whole on rank 0 alone: elsewhere only what lives there is up to date. Raises
    `RankLostError` if a rank was lost.

    block        of shared memory, which `shares` lay out
    abort        address of its abort flag
    own_shares   those of the devices of this host
    sources      tensor -> where it lies in the block
    by_name      name of a source -> its tensor
    bridge       carries what crosses ranks; None: there is one process
    """

    def __init__(
        self,
        plan: Plan,
        captured: Captured,
        workers: Workers,
        owns_workers: bool,
        seed: int,
        bridge: Bridge | None = None,
        in_place: bool = False,
    ) -> None:
        """The plan, loaded on those of its devices that `workers` serve: all of them, or a host's
        part of a run on several."""
        super().__init__(captured, seed)
        if in_place and not workers.is_local:
            says = f"is {plan.machine.name}; only a step on all cores as one device works in place"
            raise UsageError("machine", says)
        self.in_place = in_place
        self.plan, self.workers, self.bridge = plan, workers, bridge
        self._owns_workers = owns_workers
        self._key = workers.new_key()
        if bridge is None:
            part = HostPart(share_out(plan, captured.graph, captured.program))
        else:
            part = bridge.part
        self.shares, self._direct = part.shares, part.direct
        self.own_shares = tuple(s for s in self.shares.shares if s.device in workers.devices)
        needed_bytes = self.shares.size_bytes
        if len(self.own_shares) < len(self.shares.shares):
            needed_bytes = part_bytes(self.own_shares, part)
        # Writing to a block that does not fit would end the process without a message.
        free_bytes = available_bytes()
        # What works in place writes to none of it but its flags.
        if needed_bytes > free_bytes and not in_place:
            raise OutOfMemoryError(plan.machine.name, needed_bytes, free_bytes)
        for share in self.own_shares:
            device = plan.machine.devices[share.device]
            if device.torch_device:
                gpu_bytes = most_bytes(share, captured.graph, captured.program)
                if gpu_bytes > device.memory_bytes:
                    raise OutOfMemoryError(device.name, gpu_bytes, device.memory_bytes)
        self.block = Block.create(self.shares.size_bytes)
        self.abort = address_of(self.block.view(self.shares.abort, (1,), np.int64))
        # Those that another host keeps take no memory here, unless they are read or written.
        self.sources = {
            tensor: tensor_at(self.block, slot) for tensor, slot in self.shares.sources.items()
        }
        self._kept = frozenset(self.sources if part.sources is None else part.sources)
        self._outputs = {
            tensor: distinct(tensor_at(self.block, slot), slot.strides).expand(slot.shape)
            for tensor, slot in self.shares.outputs.items()
        }
        self.by_name = {
            source.name: captured.graph.outputs_of(op)[0]
            for op, source in enumerate(captured.program.sources)
            if source is not None
        }
        self._bound: list[_BoundTensor] = []
        self._given: dict[int, Tensor] = {}
        self._returned: dict[int, Tensor] = {}
        self._held = self._bind() if in_place else self._fill()
        # What shares memory with a source, or with a result before it, is handed over as a copy.
        storages = captured.graph.storages
        seen = {int(storages[tensor]) for tensor in self.sources}
        self._shared: list[int] = []
        for tensor in self._outputs:
            storage = int(storages[tensor])
            if storage in seen:
                self._shared.append(tensor)
            seen.add(storage)
        # Where each tensor that is fed goes, in order; None: nobody reads it here.
        given = [self.by_name.get(name, -1) for name, _ in captured.signature.sources]
        self._slots = [self.sources[t] if t in self._kept else None for t in given]
        self._given_tensors = given
        del self._slots[len(self._forms) :]  # inference has no use for targets
        for place, slot in enumerate(self._slots):
            if slot is None:
                self._forms[place] = None
        self._inputs = frozenset(
            self.by_name[source.name]
            for source in captured.program.sources
            if source is not None and source.role == "input"
        )
        self._processes: list[DeviceWorker] = []
        self._of_processes: list[Share] = []
        self._gpus: DeviceWorker | None = None
        # Where a GPU is the host, inputs live there, and each new one must be copied to it.
        host = plan.machine.devices[plan.machine.host_index]
        self._has_inputs_on_gpus = bool(host.torch_device)
        self._load()

    def timeline(self) -> Timeline:
        """The timeline of one more step: of all ranks on rank 0, and of this rank elsewhere."""
        self._advance(timed=True)
        shares = self.shares.shares if self.bridge is None else self.bridge.stamped()
        return timeline_of(self.plan.machine, shares, self.block)

    def keep_checkpoints(self, folder: str | Path, every: int) -> None:
        if self.bridge is None:
            super().keep_checkpoints(folder, every)
        else:
            self.bridge.checkpoints.keep(Path(folder), every)

    def save(self, folder: str | Path) -> None:
        if self.bridge is None:
            super().save(folder)
        else:
            self._check_open()
            self._save_gpus()
            owned = self._checkpointed(self.bridge.owned)
            self.bridge.checkpoints.save(Path(folder), self.steps, owned)

    def resume(self, folder: str | Path) -> int:
        if self.bridge is None:
            return super().resume(folder)
        self._check_open()
        if self.steps:
            # Flags count steps, so that setting them back would let every wait pass at once.
            raise UsageError("resume", f"comes before the first step, not after step {self.steps}")
        kept = self._checkpointed(self._kept)
        self.steps = self.bridge.checkpoints.load(Path(folder), kept)
        self._load_gpus()
        return self.steps

    # ── A step ──

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step; see `LoadedStep.step`. In place it keeps none of the tensors it was given:
        they may be all that a backward pass reads, and are the caller's to free."""
        with self._one_step:
            result = super().step(*args, **kwargs)
            if self.in_place:
                self.fed, self._given = None, {}
            return result

    def _take(self, tensors: Sequence[Tensor]) -> None:
        if self.in_place:
            graph = self.captured.graph
            self._given = {
                tensor: _laid(value.detach(), graph.strides[tensor])
                for tensor, value in zip(self._given_tensors, tensors, strict=False)
                if tensor >= 0
            }
            return
        with self._copying():
            for slot, tensor in zip(self._slots, tensors, strict=True):
                if slot is not None:
                    strides = slot.stride()
                    distinct(slot, strides).copy_(distinct(tensor.detach(), strides))
        if self.bridge is not None:
            self.bridge.spread(self._inputs)
        if self._has_inputs_on_gpus or self.bridge is not None:
            self._load_gpus(self._inputs)

    def _run_step(self) -> Any:
        self._advance()
        if self.bridge is not None:
            self.bridge.share_outputs()
        if self.in_place:
            values, self._returned = self._returned, {}
            if len(values) < len(self._outputs):
                raise RunError("the step was given up by another process, which has its flags")
            for tensor in self._shared:
                values[tensor] = values[tensor].clone()
            outputs = self.captured.program.outputs
            # The caller may change the lists and tables that a step returns.
            if not _is_constant(outputs):
                outputs = copy.deepcopy(outputs)
            handed: set[int] = set()

            def hand_over(ref: Ref) -> Tensor:
                value, again = values[ref.tensor], ref.tensor in handed
                handed.add(ref.tensor)
                return value.clone() if again else value

            return ordinary_result(substitute(outputs, Ref, hand_over))
        # Results are copies, because the next step writes over the slots.
        with self._copying():
            values = {tensor: value.clone() for tensor, value in self._outputs.items()}
        return substitute(self.captured.program.outputs, Ref, lambda ref: values[ref.tensor])

    def _copying(self) -> AbstractContextManager[None]:
        """Copies within use one thread where the devices have processes of their own: threads that
        OpenMP starts for a copy would then spin on the cores that these processes need."""
        return nullcontext() if self.workers.is_local else op_threads(1)

    def _advance(self, *, timed: bool = False) -> None:
        """Run one step on what was fed last. With `timed`, stamp every instruction for `timeline`.

        On several ranks it begins on all at one moment, and ends once it has ended on all.
        """
        self._check_open()
        if self.fed is None:
            self.feed()
        self.steps += 1
        bridge = self.bridge
        with nullcontext() if bridge is None else bridge.step(self.steps):
            self._run_devices(timed)
        if bridge is not None and (folder := bridge.checkpoints.due_after(self.steps)) is not None:
            self.save(folder)

    def _run_devices(self, timed: bool) -> None:
        """Have this host's devices run a step."""
        if not self.workers.is_local:
            rest_openmp()
        if self.in_place:
            self._follow()
        waiting = dict(zip(self._processes, self._of_processes, strict=True))
        try:
            for process, share in waiting.items():
                try:
                    inputs = (self._given,) if self.in_place else ()
                    process.begin("step", self._key, self.steps, timed, *inputs)
                except (ProcessDiedError, ProcessError) as error:
                    raise self._failure(share, error) from None
            # Every device replies before the first failure is raised.
            failure: DovetailError | None = None
            while waiting:
                # A single process is waited for directly: the selector in `ready` takes as long as
                # a small step's hand-over.
                several = [process for process in waiting if isinstance(process, Worker)]
                for process in ready(several) if len(several) > 1 else list(waiting):
                    share = waiting[process]
                    try:
                        reply = process.receive()
                    except (ProcessDiedError, ProcessError) as error:
                        # A process that is gone cannot set the flag itself, and the others wait for
                        # it.
                        publish(self.abort, 1)
                        failure = failure or self._failure(share, error)
                    else:
                        if isinstance(reply, Failed):
                            failure = failure or self._error_of(reply, share)
                        elif isinstance(reply, dict):
                            self._returned = reply
                    del waiting[process]
            if failure is not None:
                raise failure
        except BaseException as error:
            # The step ends on all devices, and this plan is closed. Borrowed workers live on if all
            # of them answer; otherwise they are killed.
            publish(self.abort, 1)
            if not self._owns_workers and not self.workers.closed:
                try:
                    for process in waiting:
                        process.receive(DRAIN_SECONDS)
                    for process in self._processes:
                        process.post("unload", self._key)
                except (ProcessDiedError, ProcessError, TimeoutError):
                    self.workers.closed = True
            if self._owns_workers or self.workers.closed:
                self.workers.close(kill=True)
            self._release(f"a step failed ({type(error).__name__})")
            raise

    def _neighbours(self) -> Neighbours:
        devices = [self.plan.machine.devices[index] for index in self.workers.devices]
        cores = [core for device in devices for core in device.cores]
        return Neighbours(cores, self.workers.pids)

    # ── State ──

    def _copies(self, what: StateName) -> dict[str, Tensor]:
        self._fetch()
        return {name: value.clone() for name, value in self._values(what, kept=True).items()}

    def _put(self, what: StateName, state: dict[str, Tensor]) -> None:
        self._fetch()
        for name, value in self._values(what, kept=True).items():
            value.copy_(state[name])
        if self.bridge is not None:
            self.bridge.spread(self.sources)
        self._load_gpus()

    def _fetch(self) -> None:
        """Bring what lives on GPUs into the block, and all into that of rank 0."""
        self._save_gpus()
        if self.bridge is not None:
            self.bridge.fetch()

    def _values(self, what: StateName, *, kept: bool = False) -> dict[str, Tensor]:
        """This part of the state itself, not copies. With `kept`, only what this host keeps."""
        if what == "optimizer_state_dict":
            own_names = {
                source.name: source.name
                for source in self.captured.program.sources
                if source is not None and source.role == "state"
            }
        else:
            # A parameter or buffer has its value under any of its names.
            aliases = self.captured.program.aliases
            own_names = {n: aliases.get(n, n) for n in self.captured.module.state_dict()}
        found = {}
        for name, own_name in own_names.items():
            if own_name not in self.by_name:
                found[name] = self._held[own_name]
            elif not kept or self.by_name[own_name] in self._kept:
                found[name] = self.sources[self.by_name[own_name]]
        return found

    def _checkpointed(self, tensors: Collection[int]) -> dict[str, Tensor]:
        """Name -> value of those of these sources that last from step to step."""
        return {
            source.name: self.sources[tensor]
            for source in self.captured.program.sources
            if source is not None
            and source.role in ("parameter", "buffer", "state")
            and (tensor := self.by_name[source.name]) in tensors
        }

    def _fill(self) -> dict[str, Tensor]:
        """Write the first value of every source but the inputs.

        Returns copies of the parameters and buffers that the module holds and the graph does not
        use.
        """
        captured = self.captured
        held = held_values(captured, self._seed)
        with torch.no_grad():
            for op, source in enumerate(captured.program.sources):
                if source is None or source.role == "input":
                    continue
                tensor = captured.graph.outputs_of(op)[0]
                value = held.pop(source.name) if source.role in ("parameter", "buffer") else None
                if tensor not in self._kept:
                    continue
                place = self.sources[tensor]
                if value is not None:
                    place.copy_(value)
                elif source.fill is not None:
                    place.fill_(source.fill)
                else:
                    value = source_value(captured.graph, tensor, source)
                    strides = captured.graph.strides[tensor]
                    distinct(place, strides).copy_(distinct(value, strides))
        return {name: value.detach().clone() for name, value in held.items()}

    def _bind(self) -> dict[str, Tensor]:
        """Let every source but the inputs be the module's own tensor, or a new one of a constant.

        Returns the parameters and buffers that the module holds and the graph does not use. Raises
        `UsageError` for a tensor that is written and lies otherwise in memory than it is captured.
        """
        captured, graph = self.captured, self.captured.graph
        module, held = captured.module, held_values(captured, self._seed)
        parts = dict(module.named_modules())
        returned = {int(graph.storages[ref]) for ref in distinct_refs(captured.program.outputs)}
        for op, source in enumerate(captured.program.sources):
            if source is None or source.role == "input":
                continue
            tensor = graph.outputs_of(op)[0]
            strides, dtype = graph.strides[tensor], getattr(torch, graph.dtypes[tensor])
            if source.role not in ("parameter", "buffer"):
                value = source_value(graph, tensor, source)
                self.sources[tensor] = _laid(value, strides)
                continue
            value = held.pop(source.name)
            path, _, name = source.name.rpartition(".")
            table = parts[path]._parameters if name in parts[path]._parameters else None
            table = parts[path]._buffers if table is None else table
            check_fits((torch.Size(graph.shapes[tensor]), dtype), value, source.name)
            is_written = graph.residences[op] != EVERYWHERE
            if is_written and value.stride() != strides:
                says = "is written by the step and lies otherwise in memory than it was captured"
                raise UsageError(source.name, says)
            is_returned = int(graph.storages[tensor]) in returned
            bound = _BoundTensor(tensor, source.name, table, name, value, strides, is_returned)
            self._bound.append(bound)
            self.sources[tensor] = bound.laid()
        return dict(held)

    def _follow(self) -> None:
        """Give the device the tensors that the module has now, where they are others than before,
        lie elsewhere, or are read as a copy. Raises `UsageError`."""
        changed = [bound for bound in self._bound if bound.has_changed()]
        for bound in self._bound:
            if bound.target is not None and bound not in changed:
                bound.target.copy_(distinct(bound.value.detach(), bound.strides))
        if not changed:
            return
        graph = self.captured.graph
        for bound in changed:
            shape, dtype = graph.shapes[bound.tensor], graph.dtypes[bound.tensor]
            check_fits((torch.Size(shape), getattr(torch, dtype)), bound.current(), bound.path)
            self.sources[bound.tensor] = bound.laid()
        fresh = {bound.tensor: self.sources[bound.tensor] for bound in changed}
        self._processes[0].ask("place", self._key, fresh)

    # ── Processes ──

    def _end(self, *, kill: bool) -> None:
        # In this process another thread may be in a step.
        with self._one_step if self.in_place else nullcontext():
            if self.bridge is not None:
                self.bridge.close()
                kill = kill or self.bridge.ranks.lost is not None
            # Workers of a rank may wait for one that is lost, so that they are not lent any more.
            if self._owns_workers or (kill and self.bridge is not None):
                self.workers.close(kill=kill)
            elif not self._closed and not self.workers.closed:
                for process in self._processes:
                    process.post("unload", self._key)
            self._release("it was closed")

    def _load(self) -> None:
        graph = self.captured.graph
        devices = self.plan.machine.devices
        # Of each process the share by which it is named in errors: all GPUs have one process.
        own = self.workers.devices
        on_gpus = [share for share in self.own_shares if self._is_on_gpu(share)]
        self._of_processes = [s for s in self.own_shares if s not in on_gpus[1:]]
        gpus = next((d for d in own if devices[d].torch_device), -1)
        try:
            self._processes = self.workers.start(
                tuple(gpus if s in on_gpus else s.device for s in self._of_processes)
            )
            beside = tuple(
                process.pid
                for process, share in zip(self._processes, self._of_processes, strict=True)
                if share in on_gpus
            )
            # All processes get their load before any is waited for, so that they bind it at the
            # same time.
            for process, share in zip(self._processes, self._of_processes, strict=True):
                if share in on_gpus:
                    self._gpus = process
                    ops = [op for each in on_gpus for op in each.ops]
                    number, calls = self._unsent(gpus, ops)
                    random = self.captured.program.random_ops
                    steps = steps_of(
                        self.plan, graph, self.shares.shares, random, own, self._direct
                    )
                    limits: dict[str, int] = {}
                    for device in (devices[d] for d in own):
                        if name := device.torch_device:
                            limits[name] = limits.get(name, 0) + device.memory_bytes
                    load: object = LoadGpus(
                        self._key, tuple(on_gpus), steps,
                        {s.device: devices[s.device].torch_device for s in on_gpus},
                        limits,
                        number, calls, graph.tensors, self._seed,
                    )  # fmt: skip
                else:
                    number, calls = self._unsent(share.device, share.ops)
                    load = Load(
                        self._key, share, number, calls, graph.tensors, self._seed, beside,
                        self.in_place,
                    )  # fmt: skip
                process.begin("load", load, files=(self.block.descriptor,))
            for process, share in zip(self._processes, self._of_processes, strict=True):
                if isinstance(reply := process.receive(), Failed):
                    raise self._error_of(reply, share)
            if self.in_place and self._processes:
                places = {t: v for t, v in self.sources.items() if t not in self._inputs}
                self._processes[0].ask("place", self._key, places)
        except BaseException:
            self.workers.close(kill=True)
            self._release("its devices could not be started")
            raise
        if self.bridge is not None:
            try:
                self.bridge.connect(self.block, self.workers, self._connect_peers)
                self.bridge.spread(self.sources)
                self._load_gpus()
            except BaseException:
                self.workers.close(kill=True)
                raise

    def _is_on_gpu(self, share: Share) -> bool:
        return bool(self.plan.machine.devices[share.device].torch_device)

    def _unsent(self, device: int, ops: Sequence[int]) -> tuple[int, dict[int, Call]]:
        """(key of the program, those calls of the ops that the device's process does not have)."""
        program = self.captured.program
        number, fresh = self.workers.unsent(program, device, ops)
        return number, {op: call for op in fresh if (call := program.calls[op]) is not None}

    def _save_gpus(self) -> None:
        """Bring what lives on GPUs into the block."""
        self._with_gpus("save_sources")

    def _load_gpus(self, tensors: frozenset[int] | None = None) -> None:
        """Bring what lives on GPUs from the block: all sources, or those of `tensors`."""
        self._with_gpus("read_sources", tensors)

    def _connect_peers(self, place: RankPlace, pairs: Sequence[PeerPair]) -> None:
        """Connect GPUs with those of other ranks, which call this as well. Raises
        `PeerLostError`."""
        if pairs:
            self._with_gpus("connect_peers", place, tuple(pairs))

    def _with_gpus(self, method: str, *arguments: object) -> None:
        """Have the GPUs' process bring their sources and the block into agreement, or connect."""
        if self._gpus is None:
            return
        if isinstance(reply := self._gpus.ask(method, self._key, *arguments), Failed):
            share = next(s for s in self.own_shares if self._is_on_gpu(s))
            raise self._error_of(reply, share)

    def _error_of(self, reply: Failed, share: Share) -> DovetailError:
        """The error for a reply that says that something was raised."""
        device = self._device_name(share)
        if reply.op >= 0 and self.plan.machine.devices[share.device].torch_device:
            # All GPUs have one process.
            device = self.plan.machine.device_names[self.plan.placement[reply.op]]
        if reply.peer is not None:
            return PeerLostError(reply.peer, reply.said)
        if reply.lacking is not None:
            return OutOfMemoryError(device, *reply.lacking)
        return WorkerError(device, self._op_name(reply.op), reply.traceback, reply.said)

    def _failure(self, share: Share, error: ProcessDiedError | ProcessError) -> RunError:
        """The error for a process that is gone, naming the device and the op that was running."""
        name = self._device_name(share)
        index = progress_of(share, self.block)[0]
        op = self._op_name(share.instructions[index].op if index >= 0 else -1)
        # Without this process the others cannot serve a plan either.
        self.workers.closed = True
        if isinstance(error, ProcessError):
            return WorkerError(name, op, error.traceback, error.said)
        return WorkerDiedError(name, op, error.status)

    def _release(self, reason: str) -> None:
        if not self._closed:
            self._closed, self.fed = reason, None
            self.sources.clear()
            self._slots.clear()
            self._outputs.clear()
            self.block.close()

    def _device_name(self, share: Share) -> str:
        return self.plan.machine.device_names[share.device]

    def _op_name(self, op: int) -> str:
        return self.captured.graph.names[op] if op >= 0 else ""


def run(
    plan: Plan,
    captured: Captured,
    *,
    seed: int = 0,
    workers: Workers | None = None,
    ranks: Ranks | None = None,
    in_place: bool = False,
) -> PlacedNetwork:
    """Load the plan on this machine's devices; return it ready to run.

    `seed` seeds the weights where the captured module is fake, and the numbers of random ops.
    `workers` are processes to share with other plans for the same devices. `ranks` run the plan
    together, each on the devices of its own, and call this together. `in_place`: the step works on
    the module's own parameters and buffers; see `pipeline.run`.

    Raises what `plans.check` raises, `OutOfMemoryError` if the block of shared memory is larger
    than the available memory, and `UsageError` for a machine that is not the one we run on. With
    ranks also `UsageError` if the devices do not deal out to them or they have different plans, and
    `RankLostError`.
    """
    check(plan, captured.graph)
    if workers is not None:
        if not workers.serves(plan.machine):
            raise UsageError("workers", f"are for other devices than {plan.machine.name}'s")
        workers.check_open()
    bridge = None if ranks is None else Bridge(plan, captured, ranks, seed)
    if workers is None:
        own = Workers(plan.machine, None if bridge is None else bridge.devices)
        return PlacedNetwork(plan, captured, own, True, seed, bridge, in_place)
    return PlacedNetwork(plan, captured, workers, False, seed, bridge, in_place)


@dataclass(eq=False)
class _BoundTensor:
    """A parameter or buffer that a step in place works on.

    tensor    in the graph
    path      its name in the module
    table     of the submodule that holds it, under the key `name`
    value     the tensor that was bound
    strides   in which the step reads it
    is_returned   the step returns it, or a view of it
    address   of the value in memory
    is_copy   the step reads a copy, as the value lies otherwise. Its numbers are copied for each
              step, because a write through `data` leaves no sign
    layout    (shape, strides) of the value
    target    the part of the copy that is written over for each step; None if there is no copy, or
              if the step returns it: then each step makes a new one
    """

    tensor: int
    path: str
    table: dict[str, Any]
    name: str
    value: Tensor
    strides: tuple[int, ...]
    is_returned: bool
    address: int = 0
    is_copy: bool = False
    layout: tuple[Any, ...] = ()
    target: Tensor | None = None

    def current(self) -> Tensor:
        """The tensor that the module has now. Raises `UsageError` if it has none."""
        value = self.table.get(self.name)
        if not isinstance(value, Tensor):
            raise UsageError(self.path, "is a tensor of the module no more")
        return value

    def has_changed(self) -> bool:
        """True if the module has another tensor, or the same elsewhere, or a new copy is read."""
        value = self.table.get(self.name)
        return (
            (self.is_copy and self.target is None)
            or value is not self.value
            or value.data_ptr() != self.address
            or (value.shape, value.stride()) != self.layout
        )

    def laid(self) -> Tensor:
        """The module's tensor now, or a copy that lies as the step reads it. It counts as seen."""
        value = self.value = self.current()
        self.address, self.layout = value.data_ptr(), (value.shape, value.stride())
        # Else a copy that is made in inference mode could be written over there alone.
        with torch.inference_mode(False):
            own = value.detach()
            laid = _laid(own, self.strides)
        self.is_copy, self.target = laid.data_ptr() != self.address, None
        if self.is_copy and not self.is_returned:
            self.target = distinct(laid, self.strides)
        return laid


def _is_constant(outputs: Any) -> bool:
    """True if nobody can change what a step returns but its tensors."""
    if type(outputs) is tuple:
        return all(map(_is_constant, outputs))
    return isinstance(outputs, Ref | int | float | str | None)


def _laid(value: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The tensor itself if it has these strides, else a copy that has."""
    if value.stride() == strides:
        return value
    empty = torch.empty_strided(value.shape, strides, dtype=value.dtype)
    distinct(empty, strides).copy_(distinct(value, strides))
    return empty


def part_bytes(own: Sequence[Share], part: HostPart) -> int:
    """The bytes of the block that a host of several touches: what its devices send and receive
    through it, the sources that it keeps, and all outputs. The rest takes no memory there."""
    slots = [
        slot
        for tensor, slot in part.shares.sources.items()
        if part.sources is None or tensor in part.sources
    ]
    slots += part.shares.outputs.values()
    for share in own:
        for instruction in share.instructions:
            match instruction:
                case SendTensor(slot=BlockSlot() as slot, destination=destination):
                    ends = share.device, destination
                case AwaitFlag(slot=BlockSlot() as slot, source=source):
                    ends = source, share.device
                case _:
                    continue
            if ends not in part.direct:
                slots.append(slot)
    touched = {slot.offset: slot.sent_bytes for slot in slots if slot.offset >= 0}
    return sum(touched.values())
