"""Recurrent layers captured by their fused kernels.

torch runs a float32 `nn.LSTM` on a CPU by one oneDNN kernel a layer and direction. Captured so, a
layer is one op, which no planner can divide. Here each kernel takes a chunk of consecutive time
steps, and hands its last hidden and cell state to the kernel of the next chunk. While one device
computes the second chunk of a layer, another one can compute the first chunk of the layer above.

The results are those of the whole kernel. Gradients of weights are summed over chunks, which rounds
otherwise.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout as dropped

_LAYER = torch.ops.aten.mkldnn_rnn_layer.default
_LSTM_MODE = 2
"""oneDNN's number for an LSTM among the kinds of cells."""
Weights = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of one layer and direction: from inputs, from hidden states, and the biases of both."""


def has_fused_kernel(args: Sequence[Any]) -> bool:
    """True if torch computes a call of `torch.lstm` with these arguments by fused kernels on a CPU.

    It does so for float32, outside of autocast. bfloat16 depends on the processor, and is left
    alone here. Packed sequences and layers with projections have no such call here either.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if len(args) != 9 or torch.is_autocast_enabled("cpu"):
        return False
    values, states, weights, has_biases, layers, _, _, bidirectional, _ = args
    if not isinstance(states, (tuple, list)):  # packed sequences have their batch sizes here
        return False
    of_layer = (4 if has_biases else 2) * (2 if bidirectional else 1)
    return (
        len(weights) == of_layer * layers
        and values.dim() == 3
        and values.numel() > 0
        and all(
            tensor.dtype == torch.float32 and tensor.device.type in ("cpu", "meta")
            for tensor in (values, *states, *weights)
        )
    )


def time_steps(args: Sequence[Any]) -> int:
    """The number of time steps of a call for which `has_fused_kernel` holds."""
    return int(args[0].shape[1 if args[8] else 0])


def lstm(args: Sequence[Any], chunks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a call of `torch.lstm` for which `has_fused_kernel` holds, in so many chunks of time
    steps a layer, or one a time step if there are fewer.

    Returns (outputs [steps, batch, directions x hidden], or [batch, steps, ...] as the inputs are;
    hidden states and cell states, both [layers x directions, batch, hidden]).

    Dropout between layers draws its numbers for all steps at once, as torch does, so that it begins
    when the layer below has ended.
    """
    values, states, flat_weights, has_biases, layers, dropout, train, both_ways, batch_first = args
    directions = 2 if both_ways else 1
    # [layers x directions] the weights of each kernel. Without biases they are zero.
    weights: list[Weights]
    if has_biases:
        weights = [tuple(flat_weights[at : at + 4]) for at in range(0, len(flat_weights), 4)]
    else:
        pairs = [(flat_weights[at], flat_weights[at + 1]) for at in range(0, len(flat_weights), 2)]
        weights = [(w, r, w.new_zeros(len(w)), r.new_zeros(len(r))) for w, r in pairs]
    # The kernel reads memory as if it were contiguous.
    hidden, cell = (state.contiguous().unbind(0) for state in states)
    last_hidden: list[Tensor] = []
    last_cell: list[Tensor] = []
    if batch_first:
        values = values.transpose(0, 1)
    pieces = _split(values, chunks)
    # The kernel itself asks for grad mode, not for this argument. It says in the graph which calls
    # need it: see `Call.in_grad_mode`.
    in_grad_mode = torch.is_grad_enabled()
    for layer in range(layers):
        if layer and dropout and train:
            pieces = _split(dropped(torch.cat(pieces), dropout, True), chunks)
        of_directions = []
        for direction in range(directions):
            at = layer * directions + direction
            made: list[Tensor] = []
            h, c, size = hidden[at], cell[at], hidden[at].shape[-1]
            for piece in reversed(pieces) if direction else pieces:
                output, h, c, _ = _LAYER(
                    piece, *weights[at], h, c, bool(direction), [], _LSTM_MODE, size, 1, has_biases,
                    False, False, in_grad_mode,
                )  # fmt: skip
                made.append(output)
            of_directions.append(made[::-1] if direction else made)
            last_hidden.append(h)
            last_cell.append(c)
        pieces = of_directions[0]
        if both_ways:
            pieces = [torch.cat(ways, -1) for ways in zip(*of_directions, strict=True)]
    outputs = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    if batch_first:
        outputs = outputs.transpose(0, 1)
    return outputs, torch.stack(last_hidden), torch.stack(last_cell)


def _split(values: Tensor, chunks: int) -> list[Tensor]:
    """The values [steps, ...] in chunks of consecutive steps, as equal as they can be."""
    if chunks <= 1:
        return [values.contiguous()]
    return [chunk.contiguous() for chunk in values.tensor_split(min(chunks, len(values)))]
