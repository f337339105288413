"""Changes inputs at random. The same generator gives the same bytes.

    tree    ──► changed tree ──► JSON or TOML ──► sometimes changed bytes
    message ──► changed fields of a protobuf message
    bytes   ──► flips, cuts, splices, insertions

Everything that grows is bounded here (`MOST_BYTES`, `MOST_DEPTH`), so that an input that a loader
takes long for or needs much memory for is the loader's fault and not the input's size.
"""

import copy
import gzip
import json
import random
import re
import string
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

MOST_BYTES = 2**20
"""A mutated input is cut at this many bytes."""
MOST_DEPTH = 100_000
BOMB_BYTES = 2**29
"""A gzip bomb unpacks to this many bytes. It has half a megabyte."""
DEPTHS = (20, 200, 900, 1100, 5000, MOST_DEPTH)
DEEPEST_TREE = 20
"""What is nested more deeply than this is no part of a tree, which Python could not copy then, but
is written into its text."""
REPEATS = (2, 3, 10, 1000, 20_000)

NUMBERS: tuple[Any, ...] = (
    0, -0.0, 1, -1, 2, 3, 7, 0.5, -0.5, 1e-9, 255, 256, 65_535, 65_536, 10**6, 10**7, 10**9,
    2**31 - 1, 2**31, -(2**31), 2**32, 2**53, 2**62, 2**63 - 1, 2**63, -(2**63), 2**64, 10**19,
    10**30, -(10**30), 10**308, 10**309, 10**4000, 1e15, 1e16, 1e18, 1e30, 1e154, 1e300, 1.7e308,
    -1.7e308, 5e-324, float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
TEXTS = (
    "", " ", "0", "-1", "1", "nan", "inf", "-inf", "1e999", "true", "null", "a", "\0", "a\0b", "\n",
    "\r\n", "\x1b[31m", "../../etc/passwd", ".", "..", "%s%n", "{}", "{0.__class__}", "\ud800",
    "\N{RIGHT-TO-LEFT OVERRIDE}", "é", "日本", "\U0001f600", "\u017f", "²", "٣", "'", '"', "\\",
    "<script>", "=", "1 x k80", "a" * 300, "a/b" * 50, "9" * 5000, "1_000", "0x10", "1e5", " 1 ",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, [], {}, [[]], [{}], [None], {"": None}, {"a": 1}, [0], [1.5], [[0, 0]],
    ["a"], [True], "\x02hole digits 5000\x02", *NUMBERS, *TEXTS,
)  # fmt: skip

# Trees of JSON and TOML


_HOLE = "\x02hole %s %d\x02"
"""Stands in a tree for what Python cannot hold there or cannot write: see `_fill`."""
_HOLES = re.compile(r'"\\u0002hole (list|dict|digits) ([0-9]+)\\u0002"')


def change_tree(rng: random.Random, tree: Any, donors: Sequence[Any] = ()) -> Any:
    """A copy of the tree with one to six changes. `donors` are trees to take parts from."""
    holder = [copy.deepcopy(tree)]
    count = 1
    while count < 6 and rng.random() < 0.4:
        count += 1
    for _ in range(count):
        container, key = _place(rng, holder)
        edit = rng.choices(_TREE_EDITS, _TREE_WEIGHTS)[0]
        edit(rng, container, key, [holder[0], *donors])
    return holder[0]


def _place(rng: random.Random, holder: list[Any]) -> tuple[Any, Any]:
    """A place in the tree: its container and its key there."""
    container: Any = holder
    key: Any = 0
    stop = rng.choice((0.05, 0.15, 0.4))
    while True:
        value = container[key]
        if not isinstance(value, dict | list) or not value or rng.random() < stop:
            return container, key
        container = value
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))


def _part(rng: random.Random, trees: list[Any]) -> Any:
    container, key = _place(rng, [rng.choice(trees)])
    return copy.deepcopy(container[key])


def _replace(rng: random.Random, container: Any, key: Any, _: list[Any]) -> None:
    container[key] = copy.deepcopy(rng.choice(VALUES))


def _replace_alike(rng: random.Random, container: Any, key: Any, _: list[Any]) -> None:
    """Another value of the same type, which gets further into a loader than one of another."""
    value = container[key]
    if isinstance(value, bool):
        container[key] = not value
    elif isinstance(value, int):
        wholes = [n for n in NUMBERS if isinstance(n, int)]
        container[key] = rng.choice(
            (value + 1, value - 1, -value, value * 2, value * 10**6, value // 2, rng.choice(wholes))
        )
    elif isinstance(value, float):
        fractions = [n for n in NUMBERS if isinstance(n, float)]
        scaled = (value * 2, value / 2, -value, value * 1e6, value * 1e300)
        container[key] = rng.choice((*scaled, rng.choice(fractions)))
    elif isinstance(value, str):
        container[key] = change_text(rng, value)
    else:
        container[key] = copy.deepcopy(rng.choice(VALUES))


def _retype(rng: random.Random, container: Any, key: Any, _: list[Any]) -> None:
    value = container[key]
    ways: list[Callable[[Any], Any]] = [
        lambda v: [v],
        lambda v: {"a": v},
        lambda v: str(v)[:1000],
        lambda v: list(v) if isinstance(v, dict | str) else [v, v],
        lambda v: {str(i): e for i, e in enumerate(v)} if isinstance(v, list) else {"": v},
        lambda v: float(v) if isinstance(v, int) and abs(v) < 10**300 else bool(v),
    ]
    container[key] = rng.choice(ways)(value)


def _delete(rng: random.Random, container: Any, key: Any, _: list[Any]) -> None:
    # The list that holds the whole tree keeps its one entry.
    if isinstance(container, list) and len(container) == 1:
        container[key] = rng.choice((None, [], {}))
    else:
        del container[key]


def _duplicate(rng: random.Random, container: Any, key: Any, _: list[Any]) -> None:
    value = copy.deepcopy(container[key])
    if isinstance(container, list):
        container.insert(rng.randrange(len(container) + 1), value)
    elif isinstance(container, dict):
        container[change_text(rng, str(key))] = value


def _rename(rng: random.Random, container: Any, key: Any, trees: list[Any]) -> None:
    if isinstance(container, dict):
        part = _part(rng, trees)
        names = [*part] if isinstance(part, dict) and part else list(TEXTS)
        name = rng.choice((rng.choice(names), change_text(rng, str(key))))
        container[name] = container.pop(key)
    elif len(container) > 1:
        other = rng.randrange(len(container))
        container[key], container[other] = container[other], container[key]


def _graft(rng: random.Random, container: Any, key: Any, trees: list[Any]) -> None:
    container[key] = _part(rng, trees)


def _repeat(rng: random.Random, container: Any, key: Any, _: list[Any]) -> None:
    value, times = container[key], rng.choice(REPEATS)
    size = len(json.dumps(value)) + 1
    times = min(times, max(2, MOST_BYTES // size))
    if isinstance(value, list):
        container[key] = [_copied(entry) for _i in range(times) for entry in value or [0]]
    elif isinstance(value, str):
        container[key] = (value or "a") * times
    elif isinstance(value, dict):
        container[key] = value | {f"k{i}": rng.choice(VALUES[:3]) for i in range(times)}
    else:
        container[key] = [value] * times


def _copied(value: Any) -> Any:
    """A copy. If places shared a part, a later change of it would count once for each of them."""
    return copy.deepcopy(value) if isinstance(value, dict | list) else value


def _nest(rng: random.Random, container: Any, key: Any, _: list[Any]) -> None:
    depth, kind = rng.choice(DEPTHS), rng.choice(("list", "dict"))
    if depth > DEEPEST_TREE:
        container[key] = _HOLE % (kind, depth)
        return
    for _i in range(depth):
        container[key] = [container[key]] if kind == "list" else {"a": container[key]}


_TREE_EDITS = (
    _replace, _replace_alike, _retype, _delete, _duplicate, _rename, _graft, _repeat, _nest,
)  # fmt: skip
_TREE_WEIGHTS = (20, 30, 8, 10, 8, 6, 12, 3, 1)


def change_text(rng: random.Random, text: str) -> str:
    """The text with some characters changed, or another text."""
    if rng.random() < 0.25:
        return rng.choice(TEXTS)
    characters = list(text)
    for _ in range(rng.choice((1, 1, 2, 4))):
        position = rng.randrange(len(characters) + 1)
        stop = min(len(characters), position + rng.choice((1, 1, 3)))
        if rng.random() < 0.25:
            del characters[position:stop]
        elif rng.random() < 0.2:
            characters[position:position] = characters[position:stop] * rng.choice((1, 5))
        else:
            new = rng.choice((rng.choice(string.printable), rng.choice(TEXTS)[:20]))
            characters[position : rng.choice((position, stop))] = new
    return "".join(characters)[:20_000]


def to_json(tree: Any) -> bytes:
    """The tree as JSON, with NaN and Infinity as Python writes them."""
    return _fill(json.dumps(tree), {"list": ("[", "]"), "dict": ('{"a":', "}")})


def to_toml(tree: Any) -> bytes:
    """The tree as TOML, with tables as inline ones. What TOML has no form for is written as JSON
    writes it, which no reader of TOML takes."""
    if not isinstance(tree, dict):
        return to_json(tree)
    lines = [f"{_quote(key)} = {_inline(value)}" for key, value in tree.items()]
    return _fill("\n".join(lines) + "\n", {"list": ("[", "]"), "dict": ("{a=", "}")})


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_quote(k)} = {_inline(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value)


def _quote(key: str) -> str:
    plain = key and all(c in string.ascii_letters + string.digits + "_-" for c in key)
    return key if plain else json.dumps(key)


def _fill(text: str, brackets: dict[str, tuple[str, str]]) -> bytes:
    """The text with nested brackets or many digits in the place of each hole, in UTF-8."""

    def content(hole: re.Match[str]) -> str:
        # A change of the hole's own text may have made it larger.
        count = min(int(hole[2][:9]), MOST_DEPTH)
        if hole[1] == "digits":
            return "9" * count
        opening, closing = brackets[hole[1]]
        return opening * count + "0" + closing * count

    filled = _HOLES.sub(content, text, count=4)
    return filled.encode("utf-8", "surrogatepass")[: 4 * MOST_BYTES]


# Bytes


def change_bytes(rng: random.Random, data: bytes, donors: Sequence[bytes] = ()) -> bytes:
    """The bytes with one to eight changes."""
    changed = bytearray(data)
    count = 1
    while count < 8 and rng.random() < 0.5:
        count += 1
    for _ in range(count):
        rng.choice(_BYTE_EDITS)(rng, changed, donors)
    return bytes(changed[: max(MOST_BYTES, len(data))])


def _span(rng: random.Random, data: bytearray | bytes) -> slice:
    start = rng.randrange(len(data) + 1)
    return slice(start, start + rng.choice((1, 2, 4, 8, 32, 256)))


def _flip(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _overwrite(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    width = rng.choice((1, 2, 4, 8))
    value = rng.choice((0, 1, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62,
                        2**63, 2**64 - 1)) % 256**width  # fmt: skip
    start = rng.randrange(len(data) + 1)
    data[start : start + width] = value.to_bytes(width, rng.choice(("little", "big")))


def _cut(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    if rng.random() < 0.5:
        del data[rng.randrange(len(data) + 1) :]
    else:
        del data[_span(rng, data)]


def _insert(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    new = rng.randbytes(rng.choice((1, 4, 16, 64)))
    if rng.random() < 0.3:
        new = rng.choice((b"\0", b"\xff", b"[", b"{", b'"', b"\x80\x80\x80")) * rng.choice(REPEATS)
    at = rng.randrange(len(data) + 1)
    data[at:at] = new


def _copy_span(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    piece = bytes(data[_span(rng, data)])
    at = rng.randrange(len(data) + 1)
    data[at : at + rng.choice((0, len(piece)))] = piece * rng.choice((1, 1, 2, 50))


def _splice(rng: random.Random, data: bytearray, donors: Sequence[bytes]) -> None:
    other = rng.choice(donors) if donors else bytes(data)
    data[rng.randrange(len(data) + 1) :] = other[rng.randrange(len(other) + 1) :]


_BYTE_EDITS = (_flip, _flip, _overwrite, _overwrite, _cut, _insert, _copy_span, _splice)


@cache
def gzip_bomb(start: bytes, fill: bytes) -> bytes:
    """A small gzip file of `BOMB_BYTES`: `start`, then `fill` again and again."""
    import zlib

    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    block = fill * (2**20 // len(fill))
    pieces = [packer.compress(start)]
    pieces += [packer.compress(block) for _ in range(BOMB_BYTES // len(block))]
    return b"".join((*pieces, packer.flush()))


def packed(rng: random.Random, data: bytes, donors: Sequence[bytes] = ()) -> bytes:
    """The data in gzip: mostly whole, sometimes changed or doubled; one in a thousand is a bomb."""
    if rng.random() < 0.001:
        return gzip_bomb(*rng.choice(((b"[", b"0,"), (b'{"format": "', b"a"), (b"", b" "))))
    archive = gzip.compress(data, 1, mtime=0)
    chance = rng.random()
    if chance < 0.2:
        return change_bytes(rng, archive, donors)
    return archive * 2 if chance < 0.22 else archive


# Protobuf messages


def change_message(rng: random.Random, message: Any, donors: Sequence[Any] = ()) -> None:
    """Changes one to six fields of a protobuf message, anywhere in it."""
    count = 1
    while count < 6 and rng.random() < 0.5:
        count += 1
    for _ in range(count):
        holder = rng.choice(list(_messages(message)))
        names = [text for inner in _messages(message) for text in _texts(inner)][:2000]
        fields = list(holder.DESCRIPTOR.fields)
        listed = [field for field, _ in holder.ListFields()]
        field = rng.choice(listed if listed and rng.random() < 0.8 else fields)
        _change_field(rng, holder, field, names or ["a"])


def _messages(message: Any) -> Iterator[Any]:
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in value if _is_repeated(field) else [value]:
                yield from _messages(inner)


def _texts(message: Any) -> Iterator[str]:
    for field, value in message.ListFields():
        if field.type == field.TYPE_STRING:
            yield from value if _is_repeated(field) else [value]


def _is_repeated(field: Any) -> bool:
    # Protobuf 6 has the property, and older ones the label.
    return bool(field.is_repeated if hasattr(field, "is_repeated") else field.label == 3)


def _change_field(rng: random.Random, holder: Any, field: Any, names: list[str]) -> None:
    value = getattr(holder, field.name)
    if _is_repeated(field):
        _change_repeated(rng, value, field, names)
    elif rng.random() < 0.15:
        holder.ClearField(field.name)
    elif field.message_type is not None:
        # An empty message counts as present.
        value.SetInParent()
    else:
        setattr(holder, field.name, _scalar(rng, field, value, names))


def _change_repeated(rng: random.Random, values: Any, field: Any, names: list[str]) -> None:
    chance = rng.random()
    if len(values) and chance < 0.25:
        del values[rng.randrange(len(values))]
    elif len(values) > 1 and chance < 0.45:
        first, second = rng.sample(range(len(values)), 2)
        if field.message_type is None:
            values[first], values[second] = values[second], values[first]
        else:
            kept = copy.deepcopy(values[first])
            values[first].CopyFrom(values[second])
            values[second].CopyFrom(kept)
    elif field.message_type is not None:
        if len(values) and chance < 0.8:
            values.add().CopyFrom(values[rng.randrange(len(values))])
        else:
            values.add()
    elif len(values) and chance < 0.8:
        place = rng.randrange(len(values))
        values[place] = _scalar(rng, field, values[place], names)
    else:
        values.append(_scalar(rng, field, field.default_value or _empty(field), names))


def _empty(field: Any) -> Any:
    return {field.TYPE_STRING: "", field.TYPE_BYTES: b""}.get(field.type, 0)


def _scalar(rng: random.Random, field: Any, value: Any, names: list[str]) -> Any:
    if field.type == field.TYPE_STRING:
        changed = rng.choice((rng.choice(names), change_text(rng, value), rng.choice(TEXTS)))
        return changed.encode("utf-8", "replace").decode()[:10_000]
    if field.type == field.TYPE_BYTES:
        return change_bytes(rng, value)[:10_000]
    if field.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE):
        return rng.choice((float("nan"), float("inf"), 0.0, -1.0, 1e30, value * 2))
    if field.enum_type is not None:
        return rng.choice([v.number for v in field.enum_type.values])
    bits = 31 if field.type in (field.TYPE_INT32, field.TYPE_SINT32) else 63
    least, most = -(2**bits), 2**bits - 1
    if field.type in (field.TYPE_UINT32, field.TYPE_UINT64):
        least, most = 0, 2 ** (bits + 1) - 1
    wholes = [n for n in NUMBERS if isinstance(n, int) and least <= n <= most]
    near = [n for n in (value + 1, value - 1, -value, value * 2) if least <= n <= most]
    return rng.choice((rng.choice(wholes), *near))


# Safetensors: a header of JSON, and the data of the tensors


def split_safetensors(data: bytes) -> tuple[Any, bytes]:
    """(header, data) of a file; a metadata entry that is JSON itself is parsed."""
    size = struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8 : 8 + size])
    inner = {k: json.loads(v) for k, v in header.get("__metadata__", {}).items()}
    return header | {"__metadata__": inner}, data[8 + size :]


def join_safetensors(rng: random.Random, header: Any, data: bytes) -> bytes:
    """The file of a changed header, whose metadata is text again where it still can be."""
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if isinstance(metadata, dict):
        texts = {k: to_json(v).decode("utf-8", "surrogatepass") for k, v in metadata.items()}
        header = header | {"__metadata__": texts}
    text = to_json(header)
    size = len(text) if rng.random() < 0.97 else rng.choice((0, 2**63, 2**64 - 1, len(text) - 1))
    return struct.pack("<Q", max(size, 0)) + text + data
