"""What is fuzzed: for each kind of file or text its seeds, how they are changed, and its loader.

    seeds ──change──► bytes ──► a file in an empty folder ──load──► loaded, or refused by an error

Seeds are made by the project's own writers. A loader here does what a command does with the file
before any long work: it reads it, and then computes what the page or the table needs of it.
"""

import base64
import contextlib
import gzip
import io
import json
import os
import random
import shutil
import struct
import sys
import tempfile
import tomllib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import mutations
from mutations import change_bytes, change_text, change_tree, to_json, to_toml

Change = Callable[[random.Random, int, Sequence[bytes]], bytes]
"""(generator, index of the seed to change, all seeds) -> an input."""


@dataclass(frozen=True)
class Target:
    """A loader, and where its inputs come from.

    ending   of the file that an input is written to
    seeds    returns valid inputs, the same ones in every process
    load     reads the file, and raises a `DovetailError` for what it refuses
    """

    name: str
    ending: str
    seeds: Callable[[], list[bytes]]
    change: Change
    load: Callable[[Path], object]

    def input(self, seed: int, index: int, seeds: Sequence[bytes]) -> bytes:
        """Input number `index`. It depends on `seed` and `index` alone; the first ones are the
        seeds as they are."""
        if index < len(seeds):
            return seeds[index]
        rng = random.Random(f"{seed}/{self.name}/{index}")
        return self.change(rng, rng.randrange(len(seeds)), seeds)


# Changes


def change_json(rng: random.Random, index: int, seeds: Sequence[bytes]) -> bytes:
    """JSON with another tree, in one of seven cases with other bytes."""
    if rng.random() < 0.1:
        return change_bytes(rng, seeds[index], seeds)
    data = to_json(change_tree(rng, _tree(seeds[index]), [_tree(seed) for seed in seeds]))
    return change_bytes(rng, data, seeds) if rng.random() < 0.05 else data


def change_zipped(rng: random.Random, index: int, seeds: Sequence[bytes]) -> bytes:
    """As `change_json`, in gzip."""
    plain = [_unzipped(seed) for seed in seeds]
    return mutations.packed(rng, change_json(rng, index, plain), seeds)


def change_toml(rng: random.Random, index: int, seeds: Sequence[bytes]) -> bytes:
    """TOML with another tree, in one of seven cases with other bytes."""
    if rng.random() < 0.1:
        return change_bytes(rng, seeds[index], seeds)
    trees = [_toml_tree(seed) for seed in seeds]
    data = to_toml(change_tree(rng, trees[index], trees))
    if rng.random() < 0.005:
        parts = b".".join([b"a"] * rng.choice(mutations.DEPTHS))
        data = rng.choice((b"[%b]\n" % parts, b"%b = 1\n" % parts)) + data
    return change_bytes(rng, data, seeds) if rng.random() < 0.05 else data


def change_csv(rng: random.Random, index: int, seeds: Sequence[bytes]) -> bytes:
    """CSV with other cells and lines."""
    if rng.random() < 0.2:
        return change_bytes(rng, seeds[index], seeds)
    rows = [line.split(",") for line in seeds[index].decode().splitlines()]
    changed = change_tree(rng, rows, [rows])
    if not isinstance(changed, list):
        return to_json(changed)
    lines = (",".join(map(str, row)) if isinstance(row, list) else str(row) for row in changed)
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def change_line(rng: random.Random, index: int, seeds: Sequence[bytes]) -> bytes:
    """A text with other characters or parts of other texts."""
    text = seeds[index].decode()
    if rng.random() < 0.3:
        other = seeds[rng.randrange(len(seeds))].decode()
        mark = rng.choice("?&=+:/. ")
        text = text.partition(mark)[0] + mark + other.rpartition(mark)[2]
    if rng.random() < 0.4:
        digits = [i for i, c in enumerate(text) if c.isdigit()]
        number = str(rng.choice([n for n in mutations.NUMBERS if n != 10**4000]))
        if digits:
            at = rng.choice(digits)
            text = text[:at] + number + text[at + 1 :]
    text = change_text(rng, text) if rng.random() < 0.7 else text
    return text.encode("utf-8", "surrogatepass")


@cache
def _unzipped(data: bytes) -> bytes:
    return gzip.decompress(data)


@cache
def _tree(data: bytes) -> Any:
    return json.loads(data)


@cache
def _toml_tree(data: bytes) -> Any:
    return tomllib.loads(data.decode())


# Graphs, instances, machines


@cache
def _graph() -> Any:
    import numpy as np

    from dovetail.graph import Graph

    names = ("w", "x", "mm", "relu", "view", "grad", "update")
    reads = [[], [], [0, 1], [2], [3], [4, 0], [5, 0]]
    return Graph(
        names=names,
        kinds=("parameter", "input", "aten.mm", "aten.relu", "aten.view", "aten.mm", "aten.add_"),
        signatures=tuple(f"{name} 8" for name in names),
        modules=("a", "", "a", "a.b", "a.b", "a", "a"),
        phases=np.array([0, 0, 1, 1, 1, 2, 3]),
        flops=np.array([0, 0, 100, 10, 0, 100, 8]),
        accessed_bytes=np.array([0, 0, 64, 32, 0, 64, 32]),
        colocation=np.array([0, -1, -1, -1, -1, -1, 0]),
        gradient_of=np.array([-1, -1, -1, -1, -1, 2, -1]),
        device_kinds=((), (), (), ("gpu", "cpu"), (), (), ()),
        producers=np.arange(7),
        shapes=((4, 2), (2, 4), (4, 4), (4, 4), (16,), (4, 4), (4, 2)),
        strides=((2, 1), (4, 1), (4, 1), (4, 1), (1,), (4, 1), (2, 1)),
        dtypes=("float32",) * 7,
        tensor_bytes=np.array([32, 32, 64, 64, 64, 64, 32]),
        storages=np.array([0, 1, 2, 3, 3, 4, 0]),
        overwrites=np.array([False] * 6 + [True]),
        input_offsets=np.cumsum([0, *map(len, reads)]),
        input_tensors=np.array([t for of_op in reads for t in of_op]),
        outputs=np.array([4]),
        control=np.array([(3, 5)]),
    )


def _written(write: Callable[[Path], object], name: str) -> bytes:
    """The bytes that `write` writes to a file of this name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        write(path)
        return path.read_bytes()


@cache
def _graphs(ending: str = ".json") -> list[bytes]:
    from dovetail.graph import save_graph

    return [_written(partial(save_graph, _graph()), f"graph{ending}")]


def _use_graph(path: Path) -> object:
    from dovetail.costs import analytic_costs
    from dovetail.graph import group
    from dovetail.graph.files import load_graph
    from dovetail.machine import parse_machine

    graph = load_graph(path)
    if not len(graph):
        return graph
    return group(graph), graph.fingerprint, analytic_costs(graph, parse_machine("2 x k80"))


@cache
def _instances() -> list[bytes]:
    def node(number: int, cpu: float, acc: float, **fields: Any) -> dict[str, Any]:
        latencies = {"cpuLatency": cpu, "fpgaLatency": acc, "supportedOnFpga": True}
        rest = {"isBackwardNode": number > 2, "size": 10 * number}
        return {"id": number, "name": f"n{number}"} | latencies | rest | fields

    nodes = [node(0, 2.0, 1.0), node(1, 3.0, 0.5, colorClass=1), node(2, 1.5, 1.0),
             node(3, 1.0, 1.0, colorClass=1)]  # fmt: skip
    edges = [
        {"sourceId": a, "destId": b, "cost": 0.25} for a, b in ((0, 1), (0, 2), (1, 3), (2, 3))
    ]
    file = {"maxSizePerFPGA": 100, "maxFPGAs": 2, "maxCPUs": 1, "nodes": nodes, "edges": edges}
    return [to_json(file)]


def _use_instance(path: Path) -> object:
    from dovetail.instances import instance_to_dict, load_instance
    from dovetail.simulator import Simulator

    instance = load_instance(path)
    Simulator(instance.graph, instance.machine, instance.costs)
    return instance_to_dict(instance.graph, instance.machine, instance.costs)


@cache
def _machines() -> list[bytes]:
    from dovetail.machine import parse_machine, save_machine

    texts = ("2 x k80 + haswell", "rl17/2", "2 x p100")
    return [_written(partial(save_machine, parse_machine(text)), "machine.toml") for text in texts]


def _use_machine(path: Path) -> object:
    from dovetail.machine import load_machine
    from dovetail.reports import machine_table

    machine = load_machine(path)
    return machine.fingerprint, machine.link_index, str(machine_table(machine))


# Plans


@cache
def _plans() -> list[bytes]:
    """Plans of the graph and of the instance that stand beside them as files."""
    import dataclasses

    from dovetail.pipeline import PlanRequest, find_plan, resolve_model

    plans = []
    with _beside():
        for model, machine, options in (
            ("graph.json", "2 x k80 + haswell", {}),
            ("graph.json", "rl17/2", {"objective": "load", "pins": (("a", "haswell"),)}),
            ("instance.json", "", {}),
            ("instance.json", "", {"objective": "latency"}),
        ):
            request = PlanRequest(
                resolve_model(model), machine, placer="single", budget="1e", compile=False,
                **options,
            )  # fmt: skip
            found = find_plan(request)
            plan = dataclasses.replace(
                found,
                planning_seconds=0.0,
                found_seconds=dict.fromkeys(found.found_seconds, 0.0),
                source=dataclasses.replace(found.source, model=model),
            )
            plans.append(_written(plan.save, "plan.json"))
    return plans


@contextlib.contextmanager
def _beside() -> Iterator[None]:
    """In a folder that holds the files which plans and command lines name."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            _write_named(Path(folder))
            yield
        finally:
            os.chdir(before)


def _write_named(folder: Path, *more: tuple[str, bytes]) -> None:
    named = [("graph.json", _graphs()[0]), ("instance.json", _instances()[0]), *more]
    for name, data in named:
        (folder / name).write_bytes(data)


def _use_plan(path: Path) -> object:
    from dovetail.pipeline import open_plan, open_to_show
    from dovetail.pipeline.opening import planned, timeline_of
    from dovetail.pipeline.sources import graph_of
    from dovetail.reports import find_limits

    with _folder_of_models():
        plan, step = open_plan(path)
        graph = graph_of(planned(plan, step))
        open_to_show(path)
        return str(plan), find_limits(timeline_of(plan, graph), graph)


_standing: list[str] = []


@contextlib.contextmanager
def _folder_of_models() -> Iterator[None]:
    """As `_beside`, in one folder for the whole process."""
    if not _standing:
        _standing.append(tempfile.mkdtemp(dir=os.environ.get("FUZZ_SCRATCH")))
        _write_named(Path(_standing[0]))
    before = Path.cwd()
    os.chdir(_standing[0])
    try:
        yield
    finally:
        os.chdir(before)


# ONNX


@cache
def _onnx_models() -> list[bytes]:
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    def tensor(name: str, array: Any) -> Any:
        return numpy_helper.from_array(np.asarray(array), name)

    def model(nodes: list[Any], inputs: dict[str, Any], weights: list[Any], **more: Any) -> bytes:
        given = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
            for name, shape in inputs.items()
        ]
        outputs = [onnx.ValueInfoProto(name="y")]
        graph = helper.make_graph(nodes, "graph", given, outputs, weights)
        imports = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
        made: bytes = helper.make_model(graph, opset_imports=imports, **more).SerializeToString(
            deterministic=True
        )
        return made

    ones = partial(np.ones, dtype=np.float32)
    node = helper.make_node
    convolutions = model(
        [
            node("Conv", ["x", "w", "b"], ["c"], name="/body/conv/Conv", pads=[1, 1, 1, 1]),
            node("BatchNormalization", ["c", "s", "b", "b", "s"], ["n"]),
            node("MaxPool", ["n"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
            node("Shape", ["p"], ["shape"]),
            node("Gather", ["shape", "zero"], ["batch"]),
            node("Unsqueeze", ["batch", "axis"], ["rows"]),
            node("Concat", ["rows", "rest"], ["size"], axis=0),
            node("Reshape", ["p", "size"], ["flat"]),
            node("Gemm", ["flat", "m"], ["y"], transB=1),
        ],
        {"x": [2, 3, 4, 4]},
        [tensor("w", ones((4, 3, 3, 3))), tensor("b", ones(4)), tensor("s", ones(4)),
         tensor("zero", np.array(0)), tensor("axis", np.array([0])),
         tensor("rest", np.array([-1])), tensor("m", ones((5, 16)))],
    )  # fmt: skip
    sequences = model(
        [
            node("SplitToSequence", ["x"], ["parts"], axis=0),
            node("SequenceLength", ["parts"], ["length"]),
            node("SequenceAt", ["parts", "zero"], ["first"]),
            node("SequenceInsert", ["parts", "first"], ["more"]),
            node("ConcatFromSequence", ["more"], ["joined"], axis=1, new_axis=0),
            node("Einsum", ["joined", "joined"], ["e"], equation="ij,kj->ik"),
            node("OneHot", ["indices", "depth", "values"], ["hot"], axis=-1),
            node("Compress", ["e", "kept"], ["k"], axis=0),
            node("If", ["yes"], ["t"],
                 then_branch=helper.make_graph([node("Relu", ["k"], ["r"])], "then", [],
                                               [onnx.ValueInfoProto(name="r")]),
                 else_branch=helper.make_graph([node("Neg", ["k"], ["m"])], "else", [],
                                               [onnx.ValueInfoProto(name="m")])),
            node("Add", ["t", "hot"], ["sum"]),
            node("twice", ["sum"], ["y"], domain="own", name="/head/twice"),
        ],
        {"x": [2, 3]},
        [tensor("zero", np.array(0)), tensor("indices", np.array([0, 1])),
         tensor("depth", np.array(1)), tensor("values", np.array([0.0, 1.0], np.float32)),
         tensor("kept", np.array([True])), tensor("yes", np.array(True))],
        functions=[helper.make_function("own", "twice", ["a"], ["c"],
                   [node("Mul", ["a", "a"], ["b"]), node("Softmax", ["b"], ["c"])],
                   [helper.make_opsetid("", 20)])],
    )  # fmt: skip
    attention = model(
        [
            node("LSTM", ["q", "w", "r"], ["", "h"], hidden_size=2),
            node("Squeeze", ["h", "axis"], ["s"]),
            node("MatMul", ["s", "m"], ["p"]),
            node("LayerNormalization", ["p", "g"], ["l"]),
            node("Resize", ["l", "", "scales"], ["z"], mode="nearest"),
            node("Slice", ["z", "starts", "ends"], ["c"]),
            node("Constant", [], ["k"], value=tensor("k", ones((2, 2)))),
            node("STFT", ["wave", "step", "", "frame"], ["f"]),
            node("GroupNormalization", ["image", "g1", "g1"], ["i"], num_groups=1),
            node("MatMul", ["c", "k"], ["a"]),
            node("ReduceSum", ["f"], ["f0"], keepdims=0),
            node("ReduceMean", ["i"], ["i0"], keepdims=0),
            node("Sum", ["a", "f0", "i0"], ["y"]),
        ],
        {"q": [3, 2, 2], "wave": [1, 16, 1], "image": [1, 2, 2, 2]},
        [tensor("w", ones((1, 8, 2))), tensor("r", ones((1, 8, 2))), tensor("axis", np.array([0])),
         tensor("m", ones((2, 2))), tensor("g", ones(2)),
         tensor("scales", np.array([1.0, 2.0], np.float32)), tensor("starts", np.array([0, 0])),
         tensor("ends", np.array([2, 2])), tensor("step", np.array(4)),
         tensor("frame", np.array(8)), tensor("g1", ones(2))],
    )  # fmt: skip
    return [convolutions, sequences, attention]


def change_onnx(rng: random.Random, index: int, seeds: Sequence[bytes]) -> bytes:
    """A model with other fields, in one of four cases with other bytes."""
    import onnx

    if rng.random() < 0.2:
        return change_bytes(rng, seeds[index], seeds)
    model = onnx.ModelProto()
    model.ParseFromString(seeds[index])
    mutations.change_message(rng, model)
    data: bytes = model.SerializeToString(deterministic=True)
    return change_bytes(rng, data, seeds) if rng.random() < 0.05 else data


def _use_onnx(path: Path) -> object:
    from dovetail.frontends.onnx import load_onnx, unknown_flops

    graph = load_onnx(path)
    return graph.fingerprint, unknown_flops(graph)


# Policies


@cache
def _policies() -> list[bytes]:
    import torch

    from dovetail.placers.learned.files import save_policy
    from dovetail.placers.learned.gdp import Gdp

    torch.manual_seed(0)
    policies = [
        Gdp(hidden=4, heads=2, sage_layers=1, layers=1, segment=4),
        Gdp(hidden=2, heads=1, sage_layers=1, layers=1, segment=4, individual=[3, 2]),
    ]
    card = {"trained_on": ["zoo:rnnlm"], "seed": 3, "updates": 5, "trials": 40}
    return [
        _written(partial(save_policy, policy=policy, card=card), "policy.safetensors")
        for policy in policies
    ]


def change_policy(rng: random.Random, index: int, seeds: Sequence[bytes]) -> bytes:
    """A policy with another header, in one of five cases with other bytes."""
    if rng.random() < 0.2:
        return change_bytes(rng, seeds[index], seeds)
    header, data = mutations.split_safetensors(seeds[index])
    return mutations.join_safetensors(rng, change_tree(rng, header, [header]), data)


def _use_policy(path: Path) -> object:
    from dovetail.errors import DovetailError
    from dovetail.placers.learned.files import load_policy, read_card

    with contextlib.suppress(DovetailError):
        read_card(path)
    return load_policy(path)


# Histories and step times


@cache
def _history() -> Any:
    import math

    import numpy as np

    from dovetail.training import Evaluation, Event, History, Outcome, Row

    rows = tuple(
        Row(i + 1, i % 2, i // 2 + 1, min(i, 1), 2, 20, 2 / (1 + i), 1.0, i / 2 + 0.9, i / 2,
            i / 2 + 0.8, math.nan if i < 3 else 0.6)
        for i in range(12)
    )  # fmt: skip
    evaluations = tuple(
        Evaluation(i, 20 * i, i / 2, {"loss": 2 - i / 12, "accuracy": i / 12}) for i in (0, 6, 12)
    )
    meta = {
        "rule": "agn", "options": {"gamma": 1e-4}, "backend": "simulated",
        "job": {"samples": 80, "epochs": 3, "batch": 10, "window": 2, "workers": 2},
    }  # fmt: skip
    events = (Event("joined", 0, 0.0), Event("lost", 1, 4.0, "killed by SIGKILL"))
    theta = np.zeros(5, np.float32)
    return History(Outcome(theta, 12, 240, 6.0, rows, events, evaluations, meta=meta))


@cache
def _histories(ending: str) -> list[bytes]:
    history = _history()
    write = history.to_csv if ending == ".csv" else history.save
    return [_written(write, f"history{ending}")]


def _use_history(path: Path) -> object:
    from dovetail.reports.training_page import render_training
    from dovetail.training import History

    history = History.from_csv(path) if path.suffix == ".csv" else History.load(path)
    history.save(path.with_name("again.json"))
    history.to_csv(path.with_name("again.csv"))
    return history.summary(), render_training([history])


@cache
def _traces() -> list[bytes]:
    return [b"seconds\n0.5\n0.25\n1.5\n", b"worker,seconds\n0,0.5\n1,0.25\n", b"0.5\n0.25\n"]


def _use_trace(path: Path) -> object:
    import numpy as np

    from dovetail.training import read_trace

    return read_trace(path).draw(np.random.default_rng(0), 8)


# Folders of runs. An input is a JSON object: name -> content of the file in base64, {} for a
# folder, or {"link": target}.


RULES = ("downpour", "adag", "sync", "async-diloco")
SIZE = 6


def _pack(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): base64.b64encode(path.read_bytes()).decode()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _unpack(files: dict[str, Any], folder: Path) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.write_bytes(base64.b64decode(content))
        elif "link" in content:
            path.symlink_to(content["link"])
        else:
            path.mkdir(exist_ok=True)


def _job(run: str = "r") -> Any:
    from dovetail.training import Job

    return Job(run=run, size=SIZE, samples=24, epochs=1, batch=1, window=2, workers=2)


@cache
def _runs() -> list[bytes]:
    return [to_json({"rule": rule, "files": _run_of(rule)}) for rule in RULES]


def _run_of(rule: str) -> dict[str, str]:
    """A run of two workers that stopped half way, with a snapshot and a log after it."""
    import numpy as np

    from dovetail.training import Evaluation, Storage, make_rule, open_folder
    from dovetail.training.records import Commit, Turn
    from dovetail.training.server import Server

    with tempfile.TemporaryDirectory() as name:
        folder = open_folder(name, _facts(rule), resume=False)
        theta = np.arange(SIZE, dtype=np.float32)
        inboxes = [np.full(SIZE, 0.1 * (worker + 1), np.float32) for worker in range(2)]
        storage = Storage(folder.center, snapshot_commits=3)
        with Server(_job(), make_rule(rule), theta, storage=storage, clock=lambda: 0.0) as server:
            sequences = [server.join(w, inboxes[w], np.zeros(SIZE, np.float32)) for w in range(2)]
            queue = [Turn(worker, lease=True, pull=True) for worker in range(2)]
            for _ in range(9):
                for delivery in server.take(queue.pop(0)) if queue else []:
                    lease, worker = delivery.reply.lease, delivery.worker
                    if lease is None:
                        continue
                    samples = lease.stop - lease.start
                    sequences[worker] += 1
                    commit = Commit("r", worker, sequences[worker], delivery.reply.clock,
                                    lease.number, samples, samples, 0.1, 1.0)  # fmt: skip
                    queue.append(Turn(worker, commit, lease=True, pull=True))
        folder.save([Evaluation(1, 4, 0.5, {"loss": 1.5})], 0, theta)
        files = _pack(Path(name))
    # The run's name is drawn anew each time; commits carry that of the job above.
    facts = json.loads(base64.b64decode(files["trainer.json"])) | {"run": "r"}
    return files | {"trainer.json": base64.b64encode(json.dumps(facts).encode()).decode()}


def _facts(rule: str) -> dict[str, Any]:
    return {"rule": rule, "job": _job().facts(), "seed": 0}


def change_run(rng: random.Random, index: int, seeds: Sequence[bytes]) -> bytes:
    """A folder with other files. Checksums are made to fit again, so that what they cover is
    reached."""
    folder = json.loads(seeds[index])
    files = folder["files"]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        name = rng.choice(list(files))
        chance = rng.random()
        if not isinstance(files[name], str) or chance < 0.03:
            files[name] = rng.choice(({}, {"link": Path(name).name}, {"link": "nowhere"}))
        elif chance < 0.06:
            del files[name]
        elif chance < 0.1:
            other = rng.choice((*files, "center/snapshot-000000000099", "center/log-000000000000"))
            files[other] = files[name]
        else:
            data = base64.b64decode(files[name])
            files[name] = base64.b64encode(_change_file(rng, name, data)).decode()
        if not files:
            break
    return to_json(folder)


def _change_file(rng: random.Random, name: str, data: bytes) -> bytes:
    if rng.random() < 0.25:
        return change_bytes(rng, data)
    # What was changed before may not be read any more.
    broken = (ValueError, struct.error, KeyError, TypeError, IndexError, RecursionError)
    with contextlib.suppress(*broken):
        if name.endswith("run.json"):
            fields = change_tree(rng, json.loads(data)["run"])
            canonical = json.dumps(fields, sort_keys=True).encode()
            return to_json({"run": fields, "crc": zlib.crc32(canonical)})
        if name.endswith(".json"):
            return to_json(change_tree(rng, json.loads(data)))
        if "snapshot-" in name:
            return _change_snapshot(rng, data)
        if "log-" in name:
            return _change_log(rng, data)
    return change_bytes(rng, data)


def _change_snapshot(rng: random.Random, data: bytes) -> bytes:
    from dovetail.training import journal

    start = len(journal.MAGIC) + journal._HEAD.size
    length, _ = journal._HEAD.unpack_from(data, len(journal.MAGIC))
    header = change_tree(rng, json.loads(data[start : start + length]))
    text = to_json(header)
    head = journal._HEAD.pack(len(text), zlib.crc32(text))
    return journal.MAGIC + head + text + data[start + length :]


def _change_log(rng: random.Random, data: bytes) -> bytes:
    """The log with one record's header or number changed, or a record doubled or left out."""
    from dovetail.training import journal

    records, at = [], len(journal._SEGMENT)
    while at < len(data):
        prefix = journal._PREFIX.unpack_from(data, at)
        begin = at + journal._PREFIX_BYTES
        header = data[begin : begin + prefix[1]]
        at = begin + prefix[1] + prefix[2]
        records.append([prefix, header, data[begin + prefix[1] : at]])
    if not records:
        return change_bytes(rng, data)
    chosen = rng.randrange(len(records))
    prefix, header, vector = records[chosen]
    chance = rng.random()
    if chance < 0.7:
        header = to_json(change_tree(rng, json.loads(header), [json.loads(r[1]) for r in records]))
    elif chance < 0.8:
        vector = change_bytes(rng, vector)
    elif chance < 0.9:
        del records[chosen]
    records[chosen : chosen + 1] = [[prefix, header, vector]] * rng.choice((1, 1, 1, 2))
    return journal._SEGMENT + b"".join(
        _sealed(i, *record) for i, record in enumerate(records, records[0][0][3])
    )


def _sealed(number: int, prefix: tuple[Any, ...], header: bytes, vector: bytes) -> bytes:
    import numpy as np

    from dovetail.training import journal
    from dovetail.training.checks import checksum

    whole = len(vector) // 4 * 4
    summed = checksum(np.frombuffer(vector[:whole], np.uint8)) if whole else prefix[4]
    packed = journal._PREFIX.pack(
        prefix[0], len(header), len(vector), number, summed, zlib.crc32(header)
    )
    seal = journal._CRC.pack(zlib.crc32(packed, zlib.crc32(b"r")))
    return packed + seal + header + vector


def _use_run(path: Path) -> object:
    import numpy as np

    from dovetail.training import Storage, make_rule, open_folder
    from dovetail.training.records import Turn
    from dovetail.training.server import Server

    archive = json.loads(path.read_bytes())
    folder = path.with_name("run")
    folder.mkdir()
    _unpack(archive["files"], folder)
    rule = archive["rule"]
    opened = open_folder(folder, _facts(rule), resume=True)
    opened.load()
    storage = Storage(opened.center, snapshot_commits=3)
    theta = np.zeros(SIZE, np.float32)
    with Server.resume(
        _job(opened.run), make_rule(rule), theta, storage=storage, clock=lambda: 1.0
    ) as server:
        server.join(0, np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32))
        server.take(Turn(0, lease=True, pull=True))
        server.stop()
        server.snapshot()
        return server.rows, server.events, server.theta


# Cost caches


@cache
def _caches() -> list[bytes]:
    return [_cache_of({"INSERT INTO probes VALUES ('device', '{\"rate\": 1.5}', 1.0)"})]


def _cache_of(statements: set[str] | list[str]) -> bytes:
    import sqlite3

    from dovetail.costs.cache import _SCHEMA, CostCache, MeasuredCost

    def write(path: Path) -> None:
        db = sqlite3.connect(path)
        db.execute("PRAGMA page_size = 512")
        db.executescript(_SCHEMA)
        db.commit()
        db.close()
        CostCache(path).add_costs("device", {"aten.mm 8": MeasuredCost(1e-3, 0.1)})
        CostCache(path).add_pace("core", 1e-3)
        db = sqlite3.connect(path)
        for statement in ("UPDATE costs SET measured_at = 1", "UPDATE paces SET measured_at = 9e9",
                          *statements):  # fmt: skip
            with contextlib.suppress(sqlite3.Error):
                db.execute(statement)
        db.commit()
        db.close()

    return _written(write, "costs.sqlite")


_SQL_VALUES = (
    "NULL", "'text'", "-1", "1e999", "-1e999", "x'00ff'", "'[1]'", "'{\"a\": 1'", "''", "'nan'",
    "9223372036854775807", "'{\"threads\": {}}'", "zeroblob(100000)",
)  # fmt: skip


def change_cache(rng: random.Random, index: int, seeds: Sequence[bytes]) -> bytes:
    """A database with other bytes, values or tables."""
    if rng.random() < 0.9:
        return change_bytes(rng, seeds[index], seeds)
    columns = (("costs", "seconds"), ("costs", "spread"), ("probes", "rates"), ("paces", "seconds"))
    table, column = rng.choice(columns)
    value = rng.choice(_SQL_VALUES)
    return _cache_of(
        [
            rng.choice(
                (
                    f"UPDATE {table} SET {column} = {value}",
                    f"DROP TABLE {table}",
                    f"ALTER TABLE {table} RENAME COLUMN {column} TO other",
                    f"ALTER TABLE {table} RENAME TO other",
                )
            )
        ]
    )


def _use_cache(path: Path) -> object:
    from dovetail.costs.cache import CostCache, MeasuredCost

    cache = CostCache(path)
    held = (
        cache.costs("device", ["aten.mm 8", "other"]), cache.probe("device"), cache.pace("core")
    )  # fmt: skip
    cache.add_costs("device", {"other": MeasuredCost(1.0, 0.0)})
    cache.add_probe("device", {"rate": 2.0})
    cache.add_pace("core", 1e-6)
    return held


# Texts


def _lines(*texts: str) -> list[bytes]:
    return [text.encode() for text in texts]


@cache
def _machine_texts() -> list[bytes]:
    return _lines(
        "4 x k80 + haswell", "2 x h100", "2 * a100 + 3 x v100 + broadwell", "rl17/2", "gdp/8",
        "here/2", "here/cpu", "here/gpu*2", "machine.toml", "rtx3090/pcie4x8/nvlink56 + ryzen9",
        "epyc/16c/4.5GHz/avx2 + ddr5-6000x8/64GiB", "rtx4090 + ryzen7 | 2 x t4 | 10gbe",
    )  # fmt: skip


def _use_machine_text(path: Path) -> object:
    from dovetail.machine import parse_machine

    return parse_machine(path.read_text("utf-8", "surrogatepass")).fingerprint


@cache
def _model_texts() -> list[bytes]:
    return _lines(
        "zoo:rnnlm?layers=2&hidden=16&steps=4&batch=3&vocabulary=50", "zoo:inception_v3?width=0.5",
        "zoo:nasnet_mobile?aux=true&skip=false", "transformers:bert?tokens=16&batch=2",
        "transformers:llama?phase=decode&dtype=bfloat16", "package.module:function?phase=decode",
        "graph.json", "graph.json.gz", "model.onnx", "model.pt2", "instance.json",
    )  # fmt: skip


def _use_model_text(path: Path) -> object:
    from dovetail.frontends.models import parse_zoo
    from dovetail.frontends.transformers_configs import load_transformers
    from dovetail.pipeline.sources import resolve_model

    text = path.read_text("utf-8", "surrogatepass")
    # Capturing a network takes long, so only its text is read.
    if text.startswith("zoo:"):
        return parse_zoo(text)
    if text.startswith("transformers:"):
        return load_transformers(text)
    with _folder_of_models():
        return resolve_model(text)


# Command lines. An input is a JSON list of arguments.


_LINES = (
    ["machine", "4 x k80 + haswell", "--out", "out.toml"],
    ["machine", "machine.toml"],
    ["networks", "rnnlm"],
    ["capture", "graph.json", "--out", "out.json.gz", "--replicas", "2", "--asynchronous"],
    ["capture", "model.onnx", "--out", "out.json", "--shape", "x=2x3x4x4"],
    ["plan", "graph.json", "--machine", "2 x k80 + haswell", "--placer", "auto", "--out",
     "out.json", "--report", "out.html", "--pin", "a=haswell", "--cap", "k80:0=1GiB"],
    ["plan", "graph.json", "--machine", "rl17/2", "--replicas", "2", "--objective", "load",
     "--whole", "a.*", "--min-gain", "5%", "--gap", "0.1", "--seed", "3", "--json"],
    ["plan", "instance.json", "--placer", "load_search", "--contiguous", "--objective", "latency"],
    ["plan", "graph.json", "--machine", "gdp/2", "--for", "device-map", "--place", "map.json"],
    ["plan", "model.onnx", "--machine", "machine.toml", "--stages", "--per-op"],
    ["report", "plan.json", "--out", "out.html", "--trace", "out.trace.json"],
    ["export", "plan.json", "--to", "device-map", "--out", "map.json"],
    ["export", "plan.json", "graph.json", "--to", "trace"],
    ["run", "plan.json", "graph.json", "--steps", "3", "--json"],
    ["train-report", "history.json", "--out", "out.html"],
    ["train", "--rules", "--json"],
    ["train", "nowhere:function", "--workers", "2", "--window", "all", "--rule", "aeasgd",
     "--option", "rho=2.5", "--lease", "30s", "--validate", "30s", "--wire", "topk:0.1",
     "--budget", "2m", "--backend-option", "latency_seconds=0.01"],
    ["predict", "nowhere:function", "weights.pt", "data.npy"],
    ["bench", "--help"],
)  # fmt: skip
_WORDS = (
    "loop", "folder", "graph.json", "missing/out.json", "", "0", "-1", "1", "7", "100000",
    "1000000000", "9" * 30, "nan", "inf", "-inf", "1e400", "a=b=c", "=", "a=", "=b", "x=0x0",
    "x=-1x2", "x=99999999999x2", "k80:0=1e30GiB", "k80:0=-1", "2 x k80", "999999999 x k80",
    "--out", "--replicas", "--json", "--machine", "--pin", "--cap", "--help", "zoo:",
    "transformers:", "transformers:bert", "a\0b", "\ud800", "é", "[a-", "*", "a" * 5000,
    "out.json", "1e9", "1e",
    "heft", "exact", "metis", "split-points", "instance", "sgd", "cpu0=1GiB",
)  # fmt: skip
_LIMITS = {
    "plan": ["--budget", "40e", "--machine", "2 x k80 + haswell", "--no-compile"],
    "train": ["--rules"],
    "run": [],
}


def change_command(rng: random.Random, index: int, seeds: Sequence[bytes]) -> bytes:
    """A command line with other arguments."""
    arguments = [*_tree(seeds[index])]
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(1, len(arguments) + 1)
        chance = rng.random()
        if chance < 0.45:
            arguments[at : at + 1] = [rng.choice(_WORDS)]
        elif chance < 0.65 and at < len(arguments):
            arguments[at] = change_text(rng, arguments[at])
        elif chance < 0.75:
            del arguments[at : at + 1]
        elif chance < 0.9:
            other = _tree(rng.choice(seeds))
            start = rng.randrange(len(other))
            arguments[at:at] = other[start : start + rng.choice((1, 2, 2, 4))]
        else:
            arguments[at:at] = arguments[at : at + 1] * rng.choice((1, 2, 200))
    return to_json(arguments)


def _use_command(path: Path) -> object:
    """Runs the command in a folder that has all files which the seeds name."""
    from dovetail.cli import main
    from dovetail.errors import InvalidError

    arguments = json.loads(path.read_bytes())
    if not isinstance(arguments, list):
        return None
    # Nothing is written outside of the folder.
    words = [str(word).lstrip("/~").replace("..", ".") for word in arguments]
    command = words[0] if words else ""
    if command in ("machine", "plan") and "here" in " ".join(words):
        return None  # it would be measured
    if command == "machine" and (len(words) < 2 or words[1].startswith("-")):
        words[1:1] = ["2 x k80"]
    # The last of equal options counts, so that no search and no measuring takes long.
    if command in _LIMITS and "--" not in words:
        limits = _LIMITS[command]
        words += limits[:2] + (limits[2:] if "--machine" not in words else limits[4:])
    folder = path.with_name("folder-of-commands")
    folder.mkdir()
    _write_named(folder, ("plan.json", _plans()[0]), ("machine.toml", _machines()[0]),
                 ("history.json", _histories(".json")[0]), ("model.onnx", _onnx_models()[0]),
                 ("map.json", b"{}"))  # fmt: skip
    (folder / "loop").symlink_to("loop")
    (folder / "folder").mkdir()
    before, argv = Path.cwd(), sys.argv
    os.chdir(folder)
    sys.argv = ["dovetail", *words]
    said, shown = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(said):
            main()
    except SystemExit as end:
        if end.code:
            raise InvalidError(said.getvalue()[-300:]) from None
    finally:
        sys.argv = argv
        os.chdir(before)
        shutil.rmtree(folder, ignore_errors=True)
    return None


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("graph", ".json", _graphs, change_json, _use_graph),
        Target("graph-gz", ".json.gz", partial(_graphs, ".json.gz"), change_zipped, _use_graph),
        Target("instance", ".json", _instances, change_json, _use_instance),
        Target("machine", ".toml", _machines, change_toml, _use_machine),
        Target("plan", ".json", _plans, change_json, _use_plan),
        Target("onnx", ".onnx", _onnx_models, change_onnx, _use_onnx),
        Target("policy", ".safetensors", _policies, change_policy, _use_policy),
        Target("history", ".json", partial(_histories, ".json"), change_json, _use_history),
        Target(
            "history-gz", ".json.gz", partial(_histories, ".json.gz"), change_zipped, _use_history
        ),
        Target("history-csv", ".csv", partial(_histories, ".csv"), change_csv, _use_history),
        Target("trace", ".csv", _traces, change_csv, _use_trace),
        Target("run", ".run.json", _runs, change_run, _use_run),
        Target("costs", ".sqlite", _caches, change_cache, _use_cache),
        Target("machine-text", ".txt", _machine_texts, change_line, _use_machine_text),
        Target("model-text", ".txt", _model_texts, change_line, _use_model_text),
        Target(
            "command",
            ".args.json",
            lambda: [to_json(line) for line in _LINES],
            change_command,
            _use_command,
        ),
    )
}
