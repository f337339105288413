"""Ranks of a program that are forked from a process which has imported the package."""

import os

import torch

from tests.support import forked
from tests.support.own_loops import Ranks, environment


class ForkedRanks(Ranks):
    """Starts the ranks of a program as `Ranks` does, without the imports of each of them.

    hosts   how many ranks are on each host, all of which this machine plays; None: all on one, and
            the launcher does not say so
    """

    def __init__(self, ranks, text, hosts=None):
        local = [(rank, {}) for rank in range(ranks)]
        if hosts is not None:
            local = [
                (
                    rank,
                    {
                        "GROUP_RANK": str(host),
                        "GROUP_WORLD_SIZE": str(len(hosts)),
                        "LOCAL_WORLD_SIZE": str(size),
                    },
                )
                for host, size in enumerate(hosts)
                for rank in range(size)
            ]
        # torchrun keeps the store in a process of its own, too.
        self.store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)
        shared = environment(
            WORLD_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(self.store.port),
            TORCHELASTIC_USE_AGENT_STORE="True",
        )
        self.processes = [
            forked.start(
                ["-c", text],
                cwd=os.getcwd(),
                env=shared | variables | {"RANK": str(rank), "LOCAL_RANK": str(place)},
            )
            for rank, (place, variables) in enumerate(local)
        ]
