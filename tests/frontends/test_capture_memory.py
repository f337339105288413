"""Memory that a model shares with NumPy or with other buffers of Python: what `forward` writes
there is refused by name, and what it only reads is captured."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from dovetail.errors import CaptureError
from dovetail.frontends import capture, initial_values, run_step
from dovetail.frontends.tracing import TRACED_TWICE

WAYS = {
    "from_numpy": torch.from_numpy,
    "as_tensor": torch.as_tensor,
    "tensor": torch.tensor,
    "from_dlpack": torch.from_dlpack,
    "frombuffer": lambda array: torch.frombuffer(array, dtype=torch.float32),
    "bytearray": lambda array: torch.frombuffer(array, dtype=torch.float32),
}
PLACES = ("attribute", "dictionary", "object", "global")
GLOBAL = {}


class Reads(nn.Module):
    """Adds what stands in memory that is not torch's, and first adds `more` to the memory."""

    def __init__(self, way, place, more):
        super().__init__()
        self.a, self.way, self.place, self.more = nn.Linear(4, 4), way, place, more
        array = np.zeros(1, np.float32)
        kept = bytearray(array.tobytes()) if way == "bytearray" else array
        self.kept = kept if place == "attribute" else None
        self.kept_in = {"memory": kept} if place == "dictionary" else {}
        self.held = SimpleNamespace(memory=kept) if place == "object" else None
        if place == "global":
            GLOBAL["memory"] = kept

    def memory(self):
        if self.place == "attribute":
            return self.kept
        if self.place == "dictionary":
            return self.kept_in["memory"]
        return self.held.memory if self.place == "object" else GLOBAL["memory"]

    def forward(self, x):
        kept = self.memory()
        if self.more:
            np.frombuffer(kept, np.float32)[0] += self.more
        return self.a(x) + WAYS[self.way](kept)[0]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", WAYS)
def test_memory_that_forward_writes_is_refused_and_left_as_it_was(way, place):
    model, x = Reads(way, place, more=1), torch.randn(3, 4)
    with pytest.raises(CaptureError, match=r"its next step is another one, as this one changes"):
        capture(model, x)
    if place != "global":
        assert np.frombuffer(model.memory(), np.float32).tolist() == [0]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", WAYS)
def test_memory_that_forward_only_reads_is_captured(way, place):
    model, x = Reads(way, place, more=0), torch.randn(3, 4)
    np.frombuffer(model.memory(), np.float32)[0] = 5
    captured = capture(model, x)
    values = initial_values(captured)
    for step in range(3):
        assert torch.equal(run_step(captured, values, (x,), step=step), model(x))


class Refills(nn.Module):
    """Fills an array with the same numbers in every step, and reads it as a tensor."""

    def __init__(self):
        super().__init__()
        self.a, self.array = nn.Linear(4, 4), np.zeros(1, np.float32)

    def forward(self, x):
        self.array[0] = 5
        return self.a(x) * torch.from_numpy(self.array)


def test_memory_that_every_step_fills_alike_is_refused_as_it_was_not_filled_before():
    model, x = Refills(), torch.randn(3, 4)
    with pytest.raises(CaptureError, match=r"writes past torch .* of shape"):
        capture(model, x)
    assert model.array[0] == 0
    expected = model(x)  # from now on the array holds what a step writes
    captured = capture(model, x)
    assert torch.equal(run_step(captured, initial_values(captured), (x,)), expected)


def test_a_long_step_that_reads_an_array_is_traced_twice_as_well():
    class Long(Reads):
        def forward(self, x):
            x = super().forward(x)
            for _ in range(TRACED_TWICE):
                x = x + 1
            return x

    with pytest.raises(CaptureError, match="its next step is another one"):
        capture(Long("from_numpy", "global", more=1), torch.randn(3, 4))


def test_an_array_that_writes_over_a_buffer_is_named():
    class Through(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.count = nn.Buffer(torch.zeros(1))
            self.array = self.count.numpy()

        def forward(self, x):
            self.array += 1
            return super().forward(x) * self.count

    model = Through()
    with pytest.raises(CaptureError, match="through the array array over buffer count"):
        capture(model, torch.randn(3, 4))
    assert model.count == 0
