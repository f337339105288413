"""Captures one model, compares it with the plain module step by step, and exports its plans.

    python benchmarks/models/measure.py NAME [--packages FOLDER] [--parts inference,training,...]

Prints one JSON object. `run.py` calls it, a process for each model.
"""

import copy
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from accelerate.utils.modeling import check_device_map
from cases import REGISTRY, Batch, Case, Model
from harness import parser_of, status_bytes
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe, pipeline
from vision import make_importable

import dovetail as dt
from dovetail.errors import DovetailError, InfeasibleError
from dovetail.exports.modules import forward_ops
from dovetail.frontends import initial_values, run_step
from dovetail.frontends.capturing import batched_experts, unwrap
from dovetail.frontends.structures import leaves
from dovetail.machine import parse_machine
from dovetail.plans import normalise
from dovetail.plans.records import planned_graph
from dovetail.runtime.forking import start_fork_server
from tests.support.placing import plan_for, random_placement

STEPS = 3
OPTIMIZERS: dict[str, tuple[Any, Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (
        dt.SGD(lr=0.05, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=False),
    ),
    "adamw": (dt.AdamW(lr=1e-3), lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False)),
}
FLOAT32_TOLERANCE, FLOAT64_TOLERANCE = 1e-4, 1e-9
PARTS = ("inference", "sgd", "adamw", "placed", "exports")


def arguments(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of one batch."""
    positional = sorted((key for key in batch if key.isdigit()), key=int)
    return tuple(batch[k] for k in positional), {
        k: v for k, v in batch.items() if k not in positional
    }


class Drawn:
    """Batches of a model, step by step, in its dtype."""

    def __init__(self, model: Model, training: bool, dtype: torch.dtype) -> None:
        self.model, self.training, self.dtype = model, training, dtype

    def step(self, step: int) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Tensor, ...]]:
        generator = torch.Generator().manual_seed(1000 + step)
        batch = self.model.draw(generator)
        if not self.training:
            batch = {k: v for k, v in batch.items() if k not in self.model.labels}
        targets = self.model.targets(generator) if self.training else ()
        args, kwargs = arguments(batch)
        return pytree.tree_map_only(
            Tensor,
            lambda x: x.to(self.dtype) if x.is_floating_point() else x,
            (args, kwargs, tuple(targets)),
        )


class Step:
    """A captured model, run in one process."""

    def __init__(self, module: nn.Module, drawn: Drawn, optimizer: Any) -> None:
        args, kwargs, targets = drawn.step(0)
        # The highest memory use so far is forgotten.
        Path("/proc/self/clear_refs").write_text("5")
        before_bytes = status_bytes("VmRSS")
        began = time.perf_counter()
        with batched_experts(module):
            self.captured = dt.capture(
                module,
                *args,
                loss=drawn.model.loss if optimizer else None,
                targets=targets,
                train=optimizer,
                **kwargs,
            )
        self.seconds = time.perf_counter() - began
        self.peak_bytes = status_bytes("VmHWM") - before_bytes
        self.values = initial_values(self.captured)

    def run(self, step: int, args: Any, kwargs: Any, targets: Sequence[Tensor]) -> Any:
        return run_flat(self.captured, self.values, step, args, kwargs, targets)

    def state(self) -> dict[str, Tensor]:
        return {
            source.name: self.values[self.captured.graph.outputs_of(op)[0]]
            for op, source in enumerate(self.captured.program.sources)
            if source is not None and source.role in ("parameter", "buffer")
        }


def run_flat(
    captured: Any, values: Any, step: int, args: Any, kwargs: Any, targets: Sequence[Tensor]
) -> Any:
    """One step in this process, on the model's own arguments."""
    tensors = captured.signature.tensors((*args, *targets), kwargs)
    count = len(captured.inputs)
    return run_step(captured, values, tensors[:count], tensors[count:], step=step)


def difference(found: Any, expected: Any) -> float:
    """The largest difference of any two tensors, relative to the largest number in the expected
    one; numbers below 1e-3 count as 1e-3."""
    found, expected = tensors_of(found), tensors_of(expected)
    if len(found) != len(expected):
        return float("inf")
    return max(map(relative, found, expected), default=0.0)


def tensors_of(value: Any) -> list[Tensor]:
    return leaves(value, Tensor)


def relative(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    a, b = a.detach(), b.detach()
    if b.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if not b.is_floating_point():
        return float((a != b).any())
    if not b.numel():
        return 0.0
    # Where the plain module has inf (a mask), the other must have it too.
    same = (a == b) | (a.isnan() & b.isnan())
    off = torch.where(same, torch.zeros_like(b), a - b).abs()
    finite = b[b.isfinite()].abs()
    scale = max(float(finite.max()) if finite.numel() else 0.0, 1e-3)
    worst = float(off.max()) / scale
    return worst if worst == worst else float("inf")


def prepared(model: Model, optimizer: str, dtype: torch.dtype) -> nn.Module:
    """The model's module, in training with gradient checkpointing where there is any."""
    module = copy.deepcopy(model.module).train(bool(optimizer))
    # Module.to would take the imaginary parts from complex parameters.
    complex_dtype = dtype.to_complex()
    module._apply(
        lambda t: (
            t.to(complex_dtype) if t.is_complex() else t.to(dtype) if t.is_floating_point() else t
        )
    )
    if optimizer and model.checkpoint is not None:
        model.checkpoint(module)
    return module


def compare(model: Model, optimizer: str, dtype: torch.dtype) -> tuple[dict[str, Any], Step]:
    """One way to run a model beside plain PyTorch, `STEPS` steps of different batches."""
    module = prepared(model, optimizer, dtype)
    record, make = OPTIMIZERS[optimizer] if optimizer else (None, None)
    drawn = Drawn(model, bool(optimizer), dtype)
    plain = copy.deepcopy(module)
    step = Step(module, drawn, record)
    worst = []
    optimizing = make(plain.parameters()) if make else None
    for number in range(STEPS):
        args, kwargs, targets = drawn.step(number)
        found = step.run(number, args, kwargs, targets)
        args, kwargs, targets = drawn.step(number)  # a cache grows where it is handed in
        # torch's grouped product, the default of transformers' experts, has no float64.
        experts = batched_experts(plain) if dtype == torch.float64 else nullcontext()
        if optimizing is None:
            with torch.no_grad(), experts:
                expected = plain(*args, **kwargs)
            worst.append(difference(found, expected))
            continue
        optimizing.zero_grad()
        with experts:
            output = plain(*args, **kwargs)
            loss = model.loss(output, *targets) if model.loss else output
            loss.backward()
        optimizing.step()
        inner = unwrap(plain)
        held = {**dict(inner.named_parameters()), **dict(inner.named_buffers())}
        state = step.state()
        off = [relative(value, held[name]) for name, value in state.items()]
        first = dict(unwrap(module).named_parameters())
        # What plain PyTorch trains and the capture leaves out differs by all there is.
        off += [
            float("inf")
            for name, value in inner.named_parameters()
            if name not in state and not torch.equal(value, first[name])
        ]
        worst.append(max(difference(found, loss), *off))
    return {
        "ops": int((~step.captured.graph.is_source).sum()),
        "seconds": round(step.seconds, 2),
        "peak_mb": round(step.peak_bytes / 1e6),
        "difference": max(worst),
        "differences": worst,
    }, step


def judged(model: Model, case: Case, optimizer: str) -> tuple[Any, Any]:
    """`compare` in float32, and in float64 where float32's rounding is too large to tell."""
    row, step = compare(model, optimizer, torch.float32)
    row["equal"] = row["difference"] <= FLOAT32_TOLERANCE
    if not row["equal"] and case.double:
        exact, _ = compare(model, optimizer, torch.float64)
        row["difference64"] = exact["difference"]
        row["equal"] = exact["difference"] <= FLOAT64_TOLERANCE
    return row, step


def placed(model: Model, step: Step, drawn: Drawn) -> dict[str, Any]:
    """The training step on two processes, each op on a random one, beside the same step in one,
    where denormal numbers count as zero as they do in a device's process."""
    graph = step.captured.graph
    machine = parse_machine("here/2")
    placement = normalise(random_placement(graph, 0), graph, machine)
    plan = plan_for(step.captured, placement, machine=machine)
    values = initial_values(step.captured)
    worst = 0.0
    # Both workers are forked of one process, which imports torch once.
    start_fork_server(["dovetail.executors.worker"])
    with dt.run(plan, step.captured) as running:
        for number in range(STEPS):
            args, kwargs, targets = drawn.step(number)
            found = running.step(*args, *targets, **kwargs)
            args, kwargs, targets = drawn.step(number)  # a cache grows where it is handed in
            torch.set_flush_denormal(True)
            expected = run_flat(step.captured, values, number, args, kwargs, targets)
            torch.set_flush_denormal(False)
            worst = max(worst, difference(found, expected))
    return {"difference": worst, "equal": worst == 0.0}


def exported(model: Model, step: Step, drawn: Drawn) -> dict[str, Any]:
    """A plan in the words of other tools, for two cards that hold three quarters of what the model
    needs on one, or for two whole ones where no such plan fits."""
    row: dict[str, Any] = {}
    graph = step.captured.graph
    alone = dt.plan(step.captured, "2 x p100", placer="single", budget="10e")
    cap = int(max(alone.peak_memory_bytes) * 0.75)
    caps = [("p100:0", cap), ("p100:1", cap)]
    for format, export, options in (
        ("device-map", dt.device_map, {}),
        ("split-points", dt.split_points, {"objective": "load"}),
    ):
        name = format.replace("-", "_")
        try:
            options |= {"format": format, "budget": "1s"}
            try:
                plan = dt.plan(step.captured, "2 x p100", caps=caps, **options)
            except InfeasibleError:
                plan = dt.plan(step.captured, "2 x p100", **options)
            found = export(plan, graph)
        except DovetailError as error:
            row[name] = {"refused": one_line(error)}
            continue
        if name == "device_map":
            # It warns of keys that name a split module's own tensors, as accelerate's own maps do.
            keys = {name for name, _ in model.module.named_modules(remove_duplicate=False)}
            keys |= {name for name, _ in model.module.named_parameters(remove_duplicate=False)}
            keys |= {name for name, _ in model.module.named_buffers(remove_duplicate=False)}
            if unknown := set(found) - keys:
                raise ValueError(f"the device map names {sorted(unknown)}, which the model lacks")
            # It takes for a parameter whatever a model's own `state_dict` adds, as neuralop's does.
            if all(isinstance(value, Tensor) for value in model.module.state_dict().values()):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)
                    check_device_map(model.module, found)
        used = plan.placement[forward_ops(planned_graph(plan, graph))]
        row[name] = {"entries": len(found), "devices": len(set(used.tolist()))}
        if name == "split_points" and found:
            row["pipelining"] = pipelined(model, drawn, found)
    return row


def pipelined(model: Model, drawn: Drawn, points: dict[str, Any]) -> dict[str, Any]:
    """The split run by torch.distributed.pipelining on gloo, a process a stage."""
    args, kwargs, _ = drawn.step(0)
    module = copy.deepcopy(model.module).eval()
    if hasattr(getattr(module, "config", None), "use_cache"):
        module.config.use_cache = False  # torch.export has no outputs of this type
    for path in points:
        # gloo sends only what is contiguous, and torch's stages send what the model made.
        module.get_submodule(path).register_forward_pre_hook(
            lambda _, args, kwargs: contiguous((args, kwargs)), with_kwargs=True
        )
    with torch.no_grad():
        expected = tensors_of(module(*args, **kwargs))[0]
        try:
            pipe = pipeline(module, mb_args=args, mb_kwargs=kwargs, split_spec=points)
        except Exception as error:
            return {"error": caused(error)}
    context = torch.multiprocessing.get_context("fork")
    results = context.Queue()
    stages = len(points) + 1
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(
                target=run_stage,
                args=(rank, stages, f"file://{folder}/meet", pipe, args, kwargs, results),
            )
            for rank in range(stages)
        ]
        for worker in workers:
            worker.start()
        try:
            found = results.get(timeout=90)
        except Exception as error:
            found = f"{type(error).__name__} after 90 s"
        for worker in workers:
            worker.join(5)
            worker.kill()
    if isinstance(found, str):
        return {"error": found}
    off = relative(torch.from_numpy(found), expected)
    return {"stages": stages, "difference": off, "equal": off <= FLOAT32_TOLERANCE}


def run_stage(
    rank: int, stages: int, meet: str, pipe: Any, args: Any, kwargs: Any, results: Any
) -> None:
    signal.alarm(120)  # it ends even where the process that waits for it was killed
    try:
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=stages)
        with torch.no_grad():
            schedule = ScheduleGPipe(pipe.build_stage(rank, torch.device("cpu")), 1)
            output = schedule.step(*args, **kwargs) if rank == 0 else schedule.step()
        if rank == stages - 1:
            results.put(tensors_of(output)[0].numpy())
    except Exception as error:
        results.put(caused(error))


def caused(error: BaseException) -> str:
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {one_line(cause)}"


def contiguous(output: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.contiguous(), output)


def one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return lines[0][:300]


def described(error: BaseException) -> dict[str, Any]:
    """An error as a row: one of ours with a single line is a refusal, anything else a crash."""
    if isinstance(error, DovetailError) and "\n" not in str(error):
        return {"refused": str(error)}
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(place.filename).name}:{place.lineno}"
    return {"crashed": f"{type(error).__name__}: {one_line(error)} ({where})"}


def measure(case: Case, parts: Sequence[str]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = case.build()
    row: dict[str, Any] = {"name": case.name, "family": case.family, "expected": case.refused}
    row["parameters"] = sum(p.numel() for p in model.module.parameters())
    row["checkpointing"] = model.checkpoint is not None
    steps: dict[str, Step] = {}
    for part in parts:
        if part == "exports" and not case.exports:
            continue
        try:
            if part in OPTIMIZERS or part == "inference":
                if part == "inference" or case.training:
                    row[part], steps[part] = judged(model, case, part.replace("inference", ""))
                continue
            kind = "sgd" if part == "placed" and case.training else "inference"
            if kind in row and kind not in steps:
                continue  # its capture was refused
            if kind not in steps:
                optimizer = kind if kind in OPTIMIZERS else ""
                drawn = Drawn(model, bool(optimizer), torch.float32)
                record = OPTIMIZERS[kind][0] if optimizer else None
                steps[kind] = Step(prepared(model, optimizer, torch.float32), drawn, record)
            run = placed if part == "placed" else exported
            row[part] = run(model, steps[kind], Drawn(model, kind in OPTIMIZERS, torch.float32))
        except Exception as error:
            row[part] = described(error)
    return row


CASE_MODULES = (
    "other_cases",
    "trap_cases",
    "transformers_cases",
    "rarer_cases",
    "vision_cases",
    "package_cases",
)
"""Importing these registers their cases."""


def load_cases() -> None:
    for module in CASE_MODULES:
        importlib.import_module(module)


def load_case(name: str, folder: str) -> Case:
    """A registered case, with the packages that it needs made importable. The other cases do
    without these, because transformers would use what it finds."""
    case = REGISTRY.cases[name]
    if case.packages:
        make_importable(folder)
    return case


def wanted(patterns: str) -> list[Case]:
    """The registered cases whose name matches one of the patterns, with commas between them."""
    return [
        case
        for name, case in REGISTRY.cases.items()
        if any(fnmatch(name, pattern) for pattern in patterns.split(","))
    ]


def main() -> None:
    parser = parser_of(__doc__, packages="")
    parser.add_argument("name")
    parser.add_argument("--parts", default=",".join(PARTS))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    load_cases()
    case = load_case(options.name, options.packages)
    print("\n" + json.dumps(measure(case, options.parts.split(","))))


if __name__ == "__main__":
    main()
