"""A small GPT's call by `dt.optimize`, once."""

import sys
from pathlib import Path

import torch

import dovetail as dt

sys.path.insert(0, str(Path(__file__).parents[1] / "compiled"))
from cases import Gpt

torch.manual_seed(0)
model = dt.optimize(Gpt().eval(), budget=sys.argv[1])
with torch.no_grad():
    model(torch.randint(1000, (8, 64)))
