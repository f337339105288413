"""`torch._dynamo`, which takes seconds to import, is imported where somebody asks for it."""

import subprocess
import sys
import textwrap

import pytest

BEFORE = """
import sys
import torch
import dovetail as dt

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
"""


def run_script(inside, after, made="pass"):
    script = BEFORE.format(inside=inside, made=made) + textwrap.dedent(after)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


def test_a_capture_does_without_it_and_what_comes_later_has_all_of_it():
    told = run_script(
        "pass",
        """
        print("torch._dynamo" in sys.modules, "torch._dynamo.config" in sys.modules)
        from torch.optim import Optimizer
        made = [Optimizer.add_param_group, Optimizer.zero_grad, Optimizer.state_dict]
        print(any("__dynamo_disable" in vars(f.__wrapped__) for f in made))
        compiled = torch.compile(plain, backend="eager", fullgraph=True)
        print(bool(torch.equal(compiled(x), plain(x))))
        import torch._dynamo.config as settings
        print(settings is torch._dynamo.config, type(torch._dynamo).__name__)
        optimizer = torch.optim.Adam(plain.parameters())
        print("__dynamo_disable" in vars(Optimizer.add_param_group.__wrapped__))
        """,
    )
    assert told == ["False", "False", "False", "True", "True", "module", "True"]


@pytest.mark.parametrize(
    "inside",
    [
        "import torch._dynamo as d; d.is_compiling()",
        "from torch._dynamo.eval_frame import OptimizedModule",
        "from torch._dynamo import config, is_compiling; is_compiling()",
        "import torch._dynamo as d; d.config.suppress_errors = True; kept.append(d)",
        "import torch._dynamo.backends.registry; torch._dynamo.list_backends()",
        "x = torch._dynamo.disable(torch.abs)(x)",
        "x = torch._dynamo.disable(recursive=False)(torch.abs)(x)",
    ],
)
def test_a_model_may_ask_for_it(inside):
    told = run_script(
        inside,
        """
        import torch._dynamo
        import torch._dynamo.backends.registry
        import torch._dynamo.config as settings
        print(type(torch._dynamo).__name__, hasattr(torch._dynamo, "convert_frame"))
        print(bool(torch.equal(torch.compile(plain, backend="eager")(x), plain(x))))
        parts = sys.modules["torch._dynamo.eval_frame"], sys.modules["torch._dynamo.utils"]
        print(parts[0].OptimizedModule is torch._dynamo.OptimizedModule)
        print(parts == (torch._dynamo.eval_frame, torch._dynamo.utils))
        print(settings is torch._dynamo.config is torch._dynamo.convert_frame.config)
        print(settings.suppress_errors is bool(kept), hasattr(torch._dynamo.backends, "registry"))
        print(all(d.convert_frame is torch._dynamo.convert_frame for d in kept))
        """,
    )
    assert told == ["module", *["True"] * 8]


@pytest.mark.parametrize(
    "made",
    [
        "self.register_buffer('held', torch.ones(4, 2).T[1:])",
        "self.register_buffer('held', torch.tensor(3))",
    ],
)
def test_a_buffer_of_any_kind_has_a_twin(made):
    told = run_script(
        "return self.out(self.embed(x).sum(1)).logsumexp(1) + self.held.sum()",
        """
        print([source.name for source in step.program.sources if source and "held" in source.name])
        """,
        made,
    )
    assert "held" in told[0]
