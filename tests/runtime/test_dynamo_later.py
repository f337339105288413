"""`torch._dynamo`, which takes seconds to import, is imported where somebody asks for it.

Each case has a process of its own. One that has imported torch and dovetail, but not dynamo, forks
them all: it has one thread, and no more than one of them runs at a time.
"""

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
import torch
import dovetail as dt

CAPTURED = '''
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 2)
        {made}

    def forward(self, x):
        {inside}
        return self.out(self.embed(x).sum(1)).logsumexp(1)

kept = []
x = torch.randint(8, (3, 5))
plain = Model()
step = dt.capture(plain, x, loss=lambda out: out.sum(), train="adam")
'''
for made, inside, after in CASES:
    if not (pid := os.fork()):
        exec(CAPTURED.format(made=made, inside=inside) + after)
        print(flush=True)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, (made, inside)
"""
LATER = """
print("torch._dynamo" in sys.modules, "torch._dynamo.config" in sys.modules, end=" ")
from torch.optim import Optimizer
made = [Optimizer.add_param_group, Optimizer.zero_grad, Optimizer.state_dict]
print(any("__dynamo_disable" in vars(f.__wrapped__) for f in made), end=" ")
compiled = torch.compile(plain, backend="eager", fullgraph=True)
print(bool(torch.equal(compiled(x), plain(x))), end=" ")
import torch._dynamo.config as settings
print(settings is torch._dynamo.config, type(torch._dynamo).__name__, end=" ")
optimizer = torch.optim.Adam(plain.parameters())
print("__dynamo_disable" in vars(Optimizer.add_param_group.__wrapped__), end="")
"""
ASKED = """
import torch._dynamo
import torch._dynamo.backends.registry
import torch._dynamo.config as settings
print(type(torch._dynamo).__name__, hasattr(torch._dynamo, "convert_frame"), end=" ")
print(bool(torch.equal(torch.compile(plain, backend="eager")(x), plain(x))), end=" ")
parts = sys.modules["torch._dynamo.eval_frame"], sys.modules["torch._dynamo.utils"]
print(parts[0].OptimizedModule is torch._dynamo.OptimizedModule, end=" ")
print(parts == (torch._dynamo.eval_frame, torch._dynamo.utils), end=" ")
print(settings is torch._dynamo.config is torch._dynamo.convert_frame.config, end=" ")
print(settings.suppress_errors is bool(kept), end=" ")
print(hasattr(torch._dynamo.backends, "registry"), end=" ")
print(all(d.convert_frame is torch._dynamo.convert_frame for d in kept), end="")
"""
NAMES = "print([s.name for s in step.program.sources if s and 'held' in s.name], end='')"
INSIDE = [
    "from torch._dynamo.eval_frame import OptimizedModule",
    "from torch._dynamo import config, is_compiling; is_compiling()",
    "import torch._dynamo as d; d.config.suppress_errors = True; kept.append(d)",
    "import torch._dynamo.backends.registry; torch._dynamo.list_backends()",
    "x = torch._dynamo.disable(torch.abs)(x)",
    "x = torch._dynamo.disable(recursive=False)(torch.abs)(x)",
]
BUFFERS = [
    "self.register_buffer('held', torch.ones(4, 2).T[1:])",
    "self.register_buffer('held', torch.tensor(3))",
]
SUMS = "return self.out(self.embed(x).sum(1)).logsumexp(1) + self.held.sum()"


@pytest.fixture(scope="module")
def told():
    """What each case has printed, by the line of it that differs."""
    cases = {
        "pass": ("pass", "pass", LATER),
        **{inside: ("pass", inside, ASKED) for inside in INSIDE},
        **{made: (made, SUMS, NAMES) for made in BUFFERS},
    }
    program = f"CASES = {list(cases.values())!r}\n{PROGRAM}"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return dict(zip(cases, ended.stdout.splitlines(), strict=True))


def test_a_capture_does_without_it_and_what_comes_later_has_all_of_it(told):
    assert told["pass"].split() == ["False", "False", "False", "True", "True", "module", "True"]


@pytest.mark.parametrize("inside", INSIDE)
def test_a_model_may_ask_for_it(inside, told):
    assert told[inside].split() == ["module", *["True"] * 8]


@pytest.mark.parametrize("made", BUFFERS)
def test_a_buffer_of_any_kind_has_a_twin(made, told):
    assert "held" in told[made]
