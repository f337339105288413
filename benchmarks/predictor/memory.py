"""Peak bytes of training steps: predicted for one device, and of torch's own loop.

    python benchmarks/predictor/memory.py --write

Each network is trained for 20 steps with Adam in a plain loop, in a process of its own. Torch's
profiler says each allocation and what is freed; the peak is the most that is held at once, with the
weights and the examples from before. Beside it stands what a plan on one device says that it needs,
and what of that is there before the step (weights, optimizer's state, examples).
"""

import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import host, in_child, parser_of, show, table

import dovetail as dt

HERE = Path(__file__).resolve().parent
STEPS = 20


def _layers() -> tuple[nn.Module, Tensor, Tensor]:
    widths = [nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(6)]
    return nn.Sequential(*widths, nn.Linear(512, 10)), torch.randn(256, 512), _classes(256, 10)


def _convolutions() -> tuple[nn.Module, Tensor, Tensor]:
    made: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 64), (64, 128)):
        made += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    made += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)]
    return nn.Sequential(*made), torch.randn(8, 3, 48, 48), _classes(8, 10)


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.logits = nn.Linear(128, 1000)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.logits(self.layers(self.embedding(ids)))
        return logits.transpose(1, 2)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.logits = nn.LSTMCell(128, 256), nn.Linear(256, 10)

    def forward(self, steps: Tensor) -> Tensor:
        state = None
        for x in steps.unbind(1):
            state = self.cell(x, state)
        assert state is not None
        out: Tensor = self.logits(state[0])
        return out


class _Around(nn.Module):
    """A U of two levels: what was computed on the way down is joined on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, 2, 1)
        self.deep, self.up = nn.Conv2d(64, 64, 3, padding=1), nn.ConvTranspose2d(64, 32, 2, 2)
        self.last, self.logits = nn.Conv2d(64, 32, 3, padding=1), nn.Conv2d(32, 10, 1)

    def forward(self, image: Tensor) -> Tensor:
        wide = self.first(image).relu()
        deep = self.deep(self.down(wide).relu()).relu()
        joined = torch.cat([wide, self.up(deep)], 1)
        out: Tensor = self.logits(self.last(joined).relu())
        return out


class _Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2000, 64)
        self.rnn, self.logits = nn.GRU(64, 128, 2, batch_first=True), nn.Linear(128, 20)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.logits(self.rnn(self.embedding(ids))[0])
        return logits.transpose(1, 2)


def _classes(*sizes: int) -> Tensor:
    return torch.randint(sizes[-1], sizes[:-1])


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor, Tensor]]] = {
    "6 x linear 512": _layers,
    "4 x conv-norm-relu": _convolutions,
    "4 x Transformer 128": lambda: (
        _Transformer(), torch.randint(1000, (8, 64)), _classes(8, 64, 1000)
    ),
    "U of two levels": lambda: (_Around(), torch.randn(4, 3, 64, 64), _classes(4, 64, 64, 10)),
    "2 x GRU 128, 30 steps": lambda: (
        _Tagger(), torch.randint(2000, (16, 30)), _classes(16, 30, 20)
    ),
    "LSTM cell, 20 steps": lambda: (_Recurrent(), torch.randn(32, 20, 128), _classes(32, 10)),
}  # fmt: skip
LOSS = nn.functional.cross_entropy


def torch_peak(name: str) -> int:
    """The most bytes that torch holds in 20 steps of a plain loop."""
    torch.manual_seed(0)
    model, inputs, targets = NETWORKS[name]()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    held = [*model.parameters(), *model.buffers(), inputs, targets]
    before = sum(t.untyped_storage().nbytes() for t in held)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        for _ in range(STEPS):
            optimizer.zero_grad()
            LOSS(model(inputs), targets).backward()
            optimizer.step()
    results = profiler.profiler.kineto_results
    events = [e for e in results.events() if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns())
    now = most = 0
    for event in events:
        now += event.nbytes()
        most = max(most, now)
    return before + most


def predicted_peak(name: str) -> tuple[int, int]:
    """(bytes that a plan on one device needs, those of them from before the step)."""
    torch.manual_seed(0)
    model, inputs, targets = NETWORKS[name]()
    step = dt.capture(model, inputs, targets=targets, loss=LOSS, train=dt.Adam(1e-3))
    plan = dt.plan(step, "ryzen9", placer="single", budget="1e")
    graph = step.graph
    before = graph.tensor_bytes[graph.is_source[graph.producers]].sum()
    return int(plan.peak_memory_bytes[0]), int(before)


def main() -> None:
    parser = parser_of(__doc__, write=False)
    parser.add_argument("--child", help="print torch's peak of this network")
    given = parser.parse_args()
    if given.child:
        print(torch_peak(given.child))
        return
    rows, errors = [], []
    for name in NETWORKS:
        measured = in_child(str(Path(__file__)), "--child", name)
        predicted, before = predicted_peak(name)
        errors.append(abs(predicted / measured - 1))
        mib = [f"{value / 2**20:.2f}" for value in (measured, predicted, before)]
        rows.append([name, *mib, f"{100 * (predicted / measured - 1):+.1f} %"])
    rows.append(["median error", "", "", "", f"{100 * statistics.median(errors):.1f} %"])
    head = ("network", "torch, MiB", "predicted", "of it before the step", "error")
    text = f"{table(head, rows)}\n\nMachine: {host(torch)}"
    show(text, HERE / "README.md" if given.write else None, "memory")


if __name__ == "__main__":
    main()
