"""Learned placers beside all others: small problems, so one thread, and no long wait for news."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _learned_placers_are_quick(monkeypatch):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr("dovetail.placers.learned.placing.IDLE_UPDATES", 3)
    yield
    torch.set_num_threads(threads)
