"""Networks of the papers, as plain modules: `NETWORKS["rnnlm"].build(hidden=64)`."""

from dovetail.networks import inception_v3, rnnlm
from dovetail.networks.records import Built, Examples, Network, Option, Options

NETWORKS: dict[str, Network] = {
    network.name: network
    for network in (
        inception_v3.NETWORK,
        rnnlm.NETWORK,
    )
}

__all__ = ["NETWORKS", "Built", "Examples", "Network", "Option", "Options"]
