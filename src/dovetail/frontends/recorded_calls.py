"""Records ATen calls that Python code makes of real tensors, for a runner's table."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dovetail.errors import UsageError
from dovetail.frontends.program import Call, Ref
from dovetail.frontends.structures import substitute
from dovetail.runtime.torch_versions import OpOverload, TorchDispatchMode


class CallRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # as in recording.py
    """Records the ATen calls that are made within, with entries of a table for tensors.

    values      entry -> tensor, of what is read. No two entries have the same object
    constants   entry -> tensor; other tensors that are read are added to it
    entries     the first entry that is free
    """

    def __init__(
        self, values: dict[int, Tensor], constants: dict[int, Tensor], entries: int
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries = entries
        self.calls: list[Any] = []  # `Call`s, and what others note among them
        self.constants = constants
        self._entry_of = {id(tensor): entry for entry, tensor in constants.items()}
        self._entry_of |= {id(tensor): entry for entry, tensor in values.items()}
        assert len({id(tensor) for tensor in values.values()}) == len(values), "distinct objects"
        # An identity is good for as long as its tensor lives.
        self._alive: list[Tensor] = [*values.values()]
        self._made: set[int] = set()

    def __torch_dispatch__(
        self, op: OpOverload, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = op(*args, **kwargs)
        made = [result] if isinstance(result, Tensor) else result
        if not isinstance(made, (list, tuple)) or not all(
            isinstance(one, (Tensor, type(None))) for one in made
        ):
            raise UsageError("MODEL", f"{op} returns no tensor, so it cannot run in a stream")
        args, kwargs = substitute((tuple(args), dict(kwargs)), Tensor, self._ref)
        results = tuple(-1 if one is None else self._new(one) for one in made)
        self.calls.append(Call(op, args, kwargs, results))
        return result

    def returning(self, returns: Sequence[int], made: Sequence[Tensor]) -> list[Call]:
        """The calls, whose results are the entries `returns` for the tensors `made`."""
        renamed: dict[int, int] = {}
        more: list[Call] = []
        for entry, tensor in zip(returns, made, strict=True):
            own = self._entry_of.get(id(tensor))
            own = self._ref(tensor).tensor if own is None else own
            if own in self._made and own not in renamed:
                renamed[own] = entry
            else:  # it is what was read, or was returned before
                own = renamed.get(own, own)
                more.append(Call(torch.ops.aten.alias.default, (Ref(own),), results=(entry,)))

        def name(ref: Ref) -> Ref:
            return Ref(renamed.get(ref.tensor, ref.tensor))

        calls = [
            replace(
                call,
                args=substitute(call.args, Ref, name),
                kwargs=substitute(call.kwargs, Ref, name),
                results=tuple(renamed.get(entry, entry) for entry in call.results),
            )
            for call in self.calls
        ]
        return calls + more

    def entry_of(self, tensor: Tensor) -> int | None:
        """The entry of a tensor; None if nothing here has read or made it."""
        return self._entry_of.get(id(tensor))

    def made(self, tensor: Tensor) -> int:
        """The entry of a tensor that something made beside the recorded calls."""
        return self._new(tensor)

    def _ref(self, tensor: Tensor) -> Ref:
        if id(tensor) not in self._entry_of:
            self.constants[self._add(tensor)] = tensor
        return Ref(self._entry_of[id(tensor)])

    def _new(self, tensor: Tensor) -> int:
        """The entry of a result. What an op writes over and returns keeps its own."""
        if id(tensor) not in self._entry_of:
            self._made.add(self._add(tensor))
        return self._entry_of[id(tensor)]

    def _add(self, tensor: Tensor) -> int:
        entry, self.entries = self.entries, self.entries + 1
        self._entry_of[id(tensor)] = entry
        self._alive.append(tensor)
        return entry
