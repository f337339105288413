"""The networks of the zoo, plain modules from papers, by name: `NETWORKS["rnnlm"].build()`."""

from dovetail.networks import (
    amoebanet,
    gnmt,
    gpt2,
    inception_v3,
    llama,
    moe,
    nasnet,
    nmt,
    randwire,
    recommender,
    rnnlm,
    squeezenet,
    transformer_xl,
    vit,
    wavenet,
)
from dovetail.networks.records import Built, Examples, Network, Option, Options

NETWORKS: dict[str, Network] = {
    network.name: network
    for network in (
        amoebanet.NETWORK,
        gnmt.NETWORK,
        gpt2.NETWORK,
        inception_v3.NETWORK,
        llama.NETWORK,
        moe.NETWORK,
        nasnet.NETWORK_LARGE,
        nasnet.NETWORK_MOBILE,
        nmt.NETWORK,
        randwire.NETWORK,
        rnnlm.NETWORK,
        squeezenet.NETWORK_1_0,
        squeezenet.NETWORK_1_1,
        transformer_xl.NETWORK,
        recommender.NETWORK,
        vit.NETWORK,
        wavenet.NETWORK,
    )
}

__all__ = ["NETWORKS", "Built", "Examples", "Network", "Option", "Options"]
