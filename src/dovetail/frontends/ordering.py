"""Control edges: who must have read a value before it is written over."""

from collections.abc import Sequence

from dovetail.errors import CaptureError


def control_edges(
    model: str,
    names: Sequence[str],
    reads: Sequence[Sequence[int]],
    producers: Sequence[int],
    storages: Sequence[int],
    overwrites: Sequence[bool],
) -> list[tuple[int, int]]:
    """(reader, writer) for every op that reads a value, or an alias of it, which `writer` writes
    over, unless data already orders the two.

    names, reads per op; producers, storages, overwrites per tensor. With bit w of `reaches[op]`
    for "data flows from op to writer w" it takes O(reads x writers / 64). Raises `CaptureError`
    if a reader can only run after its writer.
    """
    written = [tensor for tensor, over in enumerate(overwrites) if over]
    writer_of = {storages[tensor]: producers[tensor] for tensor in written}
    bit = {writer: 1 << i for i, writer in enumerate(sorted(set(writer_of.values())))}
    reaches = [0] * len(names)
    for op in reversed(range(len(names))):
        below = reaches[op] | bit.get(op, 0)
        for tensor in reads[op]:
            reaches[producers[tensor]] |= below
    edges = []
    for reader, of_reader in enumerate(reads):
        writers = {writer_of.get(storages[tensor], reader) for tensor in of_reader} - {reader}
        for writer in sorted(writers):
            if reader > writer:
                raise CaptureError(
                    model,
                    f"{names[reader]} reads what {names[writer]} has written over; clone the "
                    "value in the model",
                )
            if not reaches[reader] & bit[writer]:
                edges.append((reader, writer))
    return edges
