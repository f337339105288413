"""A policy that is nothing but a table, for tests of what trains policies."""

import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from dovetail.placers.learned.policy import Draw, Judged, Policy
from dovetail.placers.learned.records import LearningSettings

REINFORCE = LearningSettings(
    "reinforce", trials=8, rate=0.1, baseline="mean", failing=10.0, normalised=True
)
PPO = LearningSettings(
    "ppo", trials=8, rate=0.1, baseline="mean", failing=10.0, normalised=True, passes=3
)  # fmt: skip


class Table(Policy):
    """Logits of each group's devices, whatever the view says."""

    name = "table"

    def __init__(self, groups, devices):
        super().__init__()
        self.config = {"groups": groups, "devices": devices}
        self.logits = nn.Parameter(torch.zeros(groups, devices))

    def _log_probs(self, view):
        logits = self.logits[: view.groups].masked_fill(~torch.from_numpy(view.allowed), -torch.inf)
        return torch.log_softmax(logits, dim=1)

    @torch.no_grad()
    def draw(self, view, batch, generator):
        log_probs = self._log_probs(view)
        devices = torch.multinomial(
            log_probs.exp(), batch, replacement=True, generator=generator
        ).T.contiguous()
        free = torch.from_numpy(view.free)
        devices = torch.where(free, devices, torch.from_numpy(view.settled).long())
        found = self._taken(log_probs, devices, free)
        return Draw({"devices": devices}, devices.to(torch.int32).numpy(), found)

    def judge(self, view, actions):
        log_probs, free = self._log_probs(view), torch.from_numpy(view.free)
        entropies = -(log_probs.exp() * log_probs.clamp(min=-1e9)).sum(dim=1) * free
        return Judged(self._taken(log_probs, actions["devices"], free), entropies[None])

    def likeliest(self, view):
        chosen = self._log_probs(view).argmax(dim=1).numpy().astype(np.int32)
        return np.where(view.free, chosen, view.settled)

    @staticmethod
    def _taken(log_probs, devices, free):
        rows = torch.arange(len(log_probs))
        return log_probs[rows, devices] * free


class Meeting(Table):
    """A table of which no controller draws before `controllers` of them want to."""

    name = "meeting"

    def __init__(self, groups, devices, controllers, folder):
        super().__init__(groups, devices)
        self.config |= {"controllers": controllers, "folder": folder}

    def draw(self, view, batch, generator):
        folder = Path(self.config["folder"])
        folder.joinpath(f"{os.getpid()}").touch()
        while len(list(folder.iterdir())) < self.config["controllers"]:
            time.sleep(0.01)
        return super().draw(view, batch, generator)
