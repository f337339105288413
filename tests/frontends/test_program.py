"""Calls travel to worker processes."""

import pickle
import sys
from types import ModuleType

import torch

from dovetail.frontends.program import Call, Ref


def test_a_call_travels_whatever_modules_import_torch(monkeypatch):
    other = ModuleType("first_module")
    other.torch = torch
    monkeypatch.setattr(sys, "modules", {"first_module": other, **sys.modules})
    call = Call(
        torch.ops.aten.clone.default,
        (Ref(0),),
        {"memory_format": torch.preserve_format, "more": [torch.strided, torch.float32]},
        (3,),
    )
    written = pickle.dumps(call)
    assert b"first_module" not in written
    assert pickle.loads(written) == call
