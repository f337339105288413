"""Makes the step over M micro-batches from one micro-batch's training step.

    micro.0/  input ─► forward ─► loss ─► backward ──────────────────┐
    micro.1/  input ─► forward ─► loss ─► backward ─► accumulate ◄───┤
    micro.2/  input ─► forward ─► loss ─► backward ─► accumulate ◄───┘  ─► the one update

The parameters are updated once, by the mean of the M gradients, as after `loss / M` was
backpropagated M times. Buffers that a step writes, such as the running statistics of batch norm,
are written once for each micro-batch, in order, so micro-batch k reads what k - 1 wrote.

With stages two things change, and neither changes what is computed:

* *Recomputation* (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016,
  https://arxiv.org/abs/1604.06174): the backward ops of a recomputing stage read copies of its
  forward ops, "micro.k/NAME/again", which run right before them. So what the forward ops make is
  freed, but for what other stages read, and what the stage gets from others stays. Random draws are
  repeated. Ops that read a buffer that the step writes are not repeated.
* *A sum of gradients of several stages*, that of a parameter which they share (tied weights), is
  taken once, over the accumulated parts, instead of once for each micro-batch.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dovetail.errors import ReplicationError, UsageError
from dovetail.graph.copies import ADD, sums_of_gradients
from dovetail.graph.records import Bool, Graph, Int64, Phase
from dovetail.methods import PIPELINE_SCHEDULES
from dovetail.transforms.copying import (
    AGAIN,
    COPY,
    FLOATING,
    RESULT,
    SHARED,
    SUM,
    Copying,
    Replica,
    Replicated,
    Rows,
    check_count,
    joined,
    rows_of_ops,
    rows_of_tensors,
)

if TYPE_CHECKING:
    from dovetail.frontends.program import Captured

Step = TypeVar("Step", "Captured", Graph)
_TaskText = Annotated[str, Field(pattern="^[0-9]{1,7}[FBIW][0-9]{1,7}$")]


@dataclass(frozen=True)
class MicroBatches:
    """Micro-batches of a training step, and how it is cut into stages. The given step is one
    micro-batch.

    schedule        the order of each device's work: a name of `PIPELINE_SCHEDULES`; "": none
    stages          [ops of one micro-batch] the stage of each op, -1 for sources; (): no stages
    devices         [stages] the device of each; a device has several stages only if interleaved.
                    With several towers these are tower 0's
    recompute       [stages] True: backward ops read forward ops that are computed again
    tasks           [machine's devices] the tasks of each in running order, as torch writes them:
                    "2F0" is stage 2's forward pass on micro-batch 0. B is the backward pass, and I
                    and W are its gradients of activations and of parameters. With several towers
                    these are tower 0's, and the other towers' devices have ()
    """

    count: Annotated[int, Field(ge=2, le=2**20)]
    schedule: Annotated[str, Field(pattern=f"^(|{'|'.join(PIPELINE_SCHEDULES)})$")] = ""
    stages: tuple[Annotated[int, Field(ge=-1)], ...] = ()
    devices: tuple[Annotated[int, Field(ge=0)], ...] = ()
    recompute: tuple[bool, ...] = ()
    tasks: tuple[tuple[_TaskText, ...], ...] = ()
    kind: Literal["micro-batches"] = "micro-batches"

    def __post_init__(self) -> None:
        """Raise `ValueError` for stages without a device."""
        if len(self.devices) != len(self.recompute):
            raise ValueError("devices and recompute: not one entry a stage each")
        if max(self.stages, default=-1) >= len(self.devices):
            raise ValueError("stages: names a stage that has no device")

    def apply(self, step: Step) -> Step:
        """Return the step over all micro-batches. Each is `step` and takes its batch size.

        It takes the inputs of all micro-batches, one after another, then all targets in the same
        order: with two inputs and one target for each, (x0, y0, x1, y1, ..., t0, t1, ...). It
        returns the mean of the losses, and steps once by the mean of the gradients. Parameters,
        buffers and state keep their names. Drawn examples are drawn for each micro-batch.

        Raises what `micro_batched` raises, and `UsageError` for a step with a gradient scaler, and
        for stages of another number of ops.
        """
        graph = step if isinstance(step, Graph) else step.graph
        if self.stages and len(self.stages) != len(graph):
            raise UsageError(
                "stages", f"are of {len(self.stages)} ops, and the network has {len(graph)}"
            )
        stages = recompute = None
        if self.stages:
            stages, recompute = np.array(self.stages, np.int32), np.array(self.recompute, bool)
        if isinstance(step, Graph):
            return micro_batched(step, self.count, stages, recompute).graph
        from dovetail.transforms.programs import check_unscaled, step_of_copies

        check_unscaled(step, "micro_batches")
        return step_of_copies(step, micro_batched(graph, self.count, stages, recompute), self)


def micro_batched(
    graph: Graph,
    micro_batches: int,
    stages: NDArray[np.integer] | None = None,
    recompute: NDArray[np.bool_] | None = None,
) -> Replicated:
    """Return the graph of `micro_batches` micro-batches of `graph`, a training step of one.

    stages      [ops of `graph`] the stage of each; None: no stages
    recompute   [stages] True for stages that recompute their forward ops; None: none does

    Sources come first, then micro-batch after micro-batch, then the means of outputs such as the
    loss, and the updates. Takes O(micro_batches x (ops + tensors + reads)).

    Raises `UsageError` for fewer than two micro-batches, and `ReplicationError` for a graph that
    trains nothing, returns no loss, or updates anything by what is no floating-point gradient.
    """
    check_count("micro_batches", "micro-batches", micro_batches, graph)
    replica = Replica(graph)
    # Micro-batches of towers would average every micro-batch's gradients; towers of micro-batches
    # do so once a step.
    replica.check("micro-batches", own=("tower", "micro"))
    return _MicroBatches(replica, micro_batches, stages, recompute).made()


def changes_of(
    graph: Graph, micro_batches: int, stages: NDArray[np.integer], recompute: NDArray[np.bool_]
) -> bytes:
    """Return a key that is equal for stages with which `micro_batched` makes equal graphs."""
    copies = _MicroBatches(Replica(graph), micro_batches, stages, recompute)
    # Where repeated ops stand depends on the stages, not only on which ops they are.
    where = stages.tobytes() if copies.again.any() else b""
    return copies.again.tobytes() + copies.summed_once.tobytes() + where


@dataclass(frozen=True, eq=False)
class _MicroBatches(Copying):
    stages: NDArray[np.integer] | None
    recompute: NDArray[np.bool_] | None

    mean_flops = -1

    @cached_property
    def runs(self) -> Bool:
        """[ops] True for ops that every micro-batch runs: forward, backward, updates of buffers."""
        own = (self.replica.own & ~self.single.is_source) | self.replica.buffer_updates
        return np.asarray(own & ~self.summed_once)

    @cached_property
    def parameter_updates(self) -> Bool:
        return np.asarray(self.replica.updates & ~self.replica.buffer_updates)

    @cached_property
    def summed_once(self) -> Bool:
        """[ops] True for sums of gradients that are taken once, over the accumulated parts: of
        gradients of different stages, if only updates and other such sums read the result."""
        graph, once = self.single, np.zeros(len(self.single), dtype=bool)
        if self.stages is None:
            return once
        for op in reversed(np.flatnonzero(sums_of_gradients(graph)).tolist()):
            (result,) = graph.outputs_of(op)
            readers = graph.consumers_of(result)
            is_last = bool((self.parameter_updates | once)[readers].all())
            once[op] = is_last and self._differ(graph.producers[graph.inputs_of(op)])
        return once

    def _differ(self, makers: NDArray[np.integer]) -> bool:
        """True if these ops, or the parts of sums that they are, belong to several stages."""
        assert self.stages is not None
        seen: set[int] = set()
        todo = makers.tolist()
        while todo and len(seen) < 2:
            op = todo.pop()
            if self.single.kinds[op] == ADD:
                parts = self.single.producers[self.single.inputs_of(op)]
                todo += parts[self.single.phases[parts] == Phase.BACKWARD].tolist()
            seen.add(int(self.stages[op]))
        return len(seen) > 1

    @cached_property
    def gradients(self) -> Int64:
        """The tensors of one micro-batch that are accumulated, ascending."""
        graph = self.single
        once = self.parameter_updates | self.summed_once
        producers = graph.producers[graph.input_tensors]
        taken = once[graph.readers] & self.runs[producers] & ~self.replica.buffer_updates[producers]
        gradients = np.unique(graph.input_tensors[taken]).astype(np.int64)
        for tensor in gradients.tolist():
            if graph.dtypes[tensor] not in FLOATING:
                name = graph.names[graph.producers[tensor]]
                raise ReplicationError(
                    f"op {name!r} makes {graph.dtypes[tensor]} numbers for an update, and only "
                    "floating-point gradients can be accumulated",
                    name,
                )
        return gradients

    @cached_property
    def again(self) -> Bool:
        """[ops] True for the forward ops that recomputing stages repeat."""
        graph, again = self.single, np.zeros(len(self.single), dtype=bool)
        if self.stages is None or self.recompute is None or not self.recompute.any():
            return again
        chosen = self.recompute[np.maximum(self.stages, 0)] & (self.stages >= 0)
        may = chosen & (graph.phases == Phase.FORWARD)
        # A reader of a written buffer would read a later value than it did first.
        first_writers = self.replica.first_writers
        reads_buffer = first_writers[graph.storages[graph.input_tensors]] >= 0
        of_buffers = np.zeros(graph.tensors, dtype=bool)
        of_buffers[graph.storages[self._written_buffers]] = True
        bad = reads_buffer & of_buffers[graph.storages[graph.input_tensors]]
        may[graph.readers[bad]] = False
        # Repeated ops stand before the first backward op of their stage.
        begins = np.full(int(self.stages.max(initial=0)) + 1, len(graph), dtype=np.int64)
        backward_ops = np.flatnonzero(graph.phases == Phase.BACKWARD)
        np.minimum.at(begins, self.stages[backward_ops], backward_ops)
        may &= np.arange(len(graph)) < begins[np.maximum(self.stages, 0)]
        may[self.replica.only_for_buffers] = False
        offsets, producers = graph.input_offsets.tolist(), graph.producers[graph.input_tensors]
        needed = np.zeros(len(graph), dtype=bool)
        backward = (graph.phases == Phase.BACKWARD)[graph.readers]
        makers = graph.producers[graph.input_tensors]
        same = self.stages[graph.readers] == self.stages[makers]
        needed[makers[backward & same]] = True
        needed &= may
        for op in reversed(np.flatnonzero(may).tolist()):
            if not needed[op]:
                continue
            befores = producers[offsets[op] : offsets[op + 1]]
            befores = befores[may[befores] & (self.stages[befores] == self.stages[op])]
            needed[befores] = True
        return needed

    @cached_property
    def _written_buffers(self) -> Int64:
        """The tensors of buffers that updates of buffers write over."""
        graph = self.single
        written = graph.overwrites & self.replica.buffer_updates[graph.producers]
        sources = graph.is_source[graph.producers]
        storages = np.zeros(graph.tensors, dtype=bool)
        storages[graph.storages[written]] = True
        return np.flatnonzero(sources & storages[graph.storages])

    @cached_property
    def rows(self) -> Rows:
        """Sources, micro-batches one after another, means of outputs and what runs once."""
        graph, replica = self.single, self.replica
        kinds, origins, summed = self._section
        parts = [rows_of_ops(SHARED, np.flatnonzero(graph.is_source & ~replica.own))]
        inputs = np.flatnonzero(graph.is_source & replica.own)
        parts += [rows_of_ops(COPY, inputs, k) for k in range(self.count)]
        for k in range(self.count):
            # The gradients of the first micro-batch are added to nothing.
            kept = kinds != SUM if k == 0 else np.ones(len(kinds), dtype=bool)
            of_this = np.full(int(kept.sum()), k)
            parts.append(Rows(kinds[kept], origins[kept], of_this, summed[kept]))
        parts.append(rows_of_tensors(RESULT, replica.returned))
        once = np.flatnonzero(self.parameter_updates | self.summed_once)
        return joined([*parts, rows_of_ops(SHARED, once)])

    @cached_property
    def _section(self) -> tuple[Int64, Int64, Int64]:
        """(kinds, origins, summed) of what one micro-batch runs, in order."""
        graph = self.single
        entries: list[tuple[int, int, int, int, int]] = []
        waits: dict[int, int] = {}
        for before, after in graph.control.tolist():
            waits[after] = max(waits.get(after, -1), before)
        for op in np.flatnonzero(self.runs).tolist():
            at = op
            if self.replica.buffer_updates[op]:
                # Right behind what it waits for, and not behind the whole backward pass.
                needs = [waits.get(op, -1), *graph.producers[graph.inputs_of(op)].tolist()]
                places = [e for e in needs if self.runs[e] and not self.replica.buffer_updates[e]]
                at = max(places, default=op)
            entries.append((at, 0 if at == op else 1, op, COPY, -1))
        gradients = self.gradients.tolist()
        entries += [(int(graph.producers[tensor]), 2, tensor, SUM, tensor) for tensor in gradients]
        again = np.flatnonzero(self.again)
        if len(again):
            assert self.stages is not None
            backward = np.flatnonzero((graph.phases == Phase.BACKWARD) & self.runs)
            begins: dict[int, int] = {}
            for op in backward.tolist():
                begins.setdefault(int(self.stages[op]), op)
            entries += [(begins[int(self.stages[op])], -1, op, AGAIN, -1) for op in again.tolist()]
        entries.sort()
        columns = np.array(entries, dtype=np.int64).reshape(-1, 5).T
        _, _, which, kinds, summed = columns
        return kinds, np.where(kinds == SUM, -1, which), summed

    def reads_of_copies(self, rows: Int64, tensors: Int64) -> Int64:
        """A copy reads its micro-batch's tensors in place of its origin's, but for what the
        micro-batch before wrote, what is recomputed for it, and sums of gradients."""
        kinds, origins, _, _ = self.rows
        graph, view = self.single, self.views[rows]
        reads = self.tensors[view, tensors]
        # The old value of a buffer is what the micro-batch before wrote.
        written = self.latest_buffers[tensors]
        later = (written >= 0) & (view > 0)
        reads[later] = self.tensors[view[later] - 1, written[later]]
        if self.again.any():
            repeated = self.tensors_at(self.places_of(AGAIN))[view, tensors]
            assert self.stages is not None
            # Only the stage's own backward ops, and its repeated ops, read what is repeated.
            is_reader = (kinds[rows] == AGAIN) | (graph.phases[origins[rows]] == Phase.BACKWARD)
            same = self.stages[origins[rows]] == self.stages[graph.producers[tensors]]
            swaps = (repeated >= 0) & is_reader & same
            reads[swaps] = repeated[swaps]
        if len(self.gradients):
            accumulated = np.zeros(graph.tensors, dtype=bool)
            accumulated[self.gradients] = True
            once = (kinds[rows] == SHARED) & accumulated[tensors]
            reads[once] = self.sums[-1, tensors[once]]
        return reads

    @cached_property
    def latest_buffers(self) -> Int64:
        """[tensors of one] for a buffer's tensor the value that a micro-batch writes; else -1."""
        graph = self.single
        latest = np.full(graph.tensors, -1, dtype=np.int64)
        written = np.flatnonzero(graph.overwrites & self.replica.buffer_updates[graph.producers])
        by_storage = np.full(graph.tensors, -1, dtype=np.int64)
        np.maximum.at(by_storage, graph.storages[written], written)
        buffers = self._written_buffers
        latest[buffers] = by_storage[graph.storages[buffers]]
        return latest

    @cached_property
    def control(self) -> Int64:
        """The control edges of each micro-batch, and one from each recomputed op that reads a
        parameter to the parameter's update."""
        before, after = self.single.control.astype(np.int64).T
        pairs = [np.stack([places[before], places[after]], axis=1) for places in self.places]
        if self.again.any():
            graph = self.single
            writers = self.replica.first_writers[graph.storages[graph.input_tensors]]
            waits = self.again[graph.readers] & (writers >= 0)
            readers, updates = graph.readers[waits], writers[waits]
            again = self.places_of(AGAIN)
            pairs += [
                np.stack([again[k, readers], self.places[k, updates]], axis=1)
                for k in range(self.count)
            ]
        edges = np.concatenate(pairs)
        return np.unique(edges[(edges >= 0).all(axis=1)], axis=0)

    def name_of(self, kind: int, origin: int, copy: int, reduced: int) -> tuple[str, str]:
        """See the module `graph.copies`."""
        graph = self.single
        module = graph.modules[origin if origin >= 0 else int(graph.producers[reduced])]
        if kind == RESULT:
            return "average/loss", module
        if kind == SUM:
            label, _ = self.replica.labels.get(reduced, ("", ""))
            return f"accumulate.{copy}/{label or graph.names[graph.producers[reduced]]}", module
        name = graph.names[origin]
        if kind == SHARED:
            return name, module
        return f"micro.{copy}/{name}{'/again' * (kind == AGAIN)}", module

    @property
    def colocation(self) -> Int64:
        """All copies of an op have its id."""
        origins = self.rows.origins
        return np.where(origins < 0, -1, self.single.colocation[origins])

    @property
    def blocks(self) -> Int64:
        """Micro-batches share the storages of what is not theirs; each has storages of its own, and
        others for what it repeats."""
        kinds = self.rows.kinds[self.producers]
        shared = self.replica.shared_storages[self.single.storages[self.stands_for]]
        own = 1 + 2 * self.views[self.producers] + (kinds == AGAIN)
        return np.where(shared | (kinds == SHARED), 0, own)
