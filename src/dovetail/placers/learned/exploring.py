"""How a policy that decides every group by itself draws placements that differ in useful ways.

Drawn independently, the groups of a domain never change their device together, and where a
policy has become certain all trials are alike. So a share of the trials decides for *clusters*:
neighbours of the same likeliest device are joined, each pair with a chance p that is drawn for the
trial, and a cluster is one decision, by the mean of its members' logits; R. H. Swendsen and J.-S.
Wang, "Nonuniversal critical dynamics in Monte Carlo simulations", Physical Review Letters 58, 1987,
pages 86 to 88, move spins in this way. And every decision is uniform with a small chance, such
that `floor` of a trial's are:

    pi(d) = (1 - e) softmax(mean logits of the cluster)(d) + e / allowed,   e = floor / decisions

Clusters are drawn before any device is, and recorded with the actions, so that the probability of
what was decided, given the clusters, is exact.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from dovetail.placers.learned.records import Int64, View


def draw_clusters(view: View, likeliest: NDArray[np.integer], share: float, seed: int) -> Int64:
    """[batch, groups] the first group of each group's cluster; a trial without clusters has each
    group at itself. `likeliest` [batch, groups]: devices, of the trial's mode."""
    rng = np.random.default_rng(seed)
    own = np.arange(view.groups)
    batch = len(likeliest)
    labels = np.tile(own, (batch, 1))
    joint = (view.allowed[view.sources] == view.allowed[view.destinations]).all(axis=1)
    joint &= view.free[view.sources] & view.free[view.destinations]
    sources, destinations = view.sources[joint], view.destinations[joint]
    for trial in range(round(batch * share)):
        like = likeliest[trial][sources] == likeliest[trial][destinations]
        a, b = sources[like], destinations[like]
        kept = rng.random(len(a)) < rng.random()
        ends = (a[kept], b[kept])
        joined = coo_array((np.ones(len(ends[0]), np.int8), ends), shape=(view.groups,) * 2)
        _, of_group = connected_components(joined, directed=False)
        _, first = np.unique(of_group, return_index=True)
        labels[trial] = first[of_group]
    return labels


def chances(logits: Tensor, clusters: Tensor, open_: Tensor, floor: float) -> Tensor:
    """[batch, groups, devices] of each cluster's decision, at its first group; elsewhere of no use.

    logits     [batch or 1, groups, devices] of each trial, -inf where a group may not be
    clusters   [batch, groups]
    open_      [batch, groups] True where a decision is made
    """
    batch, groups = clusters.shape
    allowed = torch.isfinite(logits[0])
    finite = logits.masked_fill(~allowed, 0.0)
    flat = (clusters + groups * torch.arange(batch, device=clusters.device)[:, None]).reshape(-1)
    sums = finite.new_zeros(batch * groups, logits.shape[2])
    sums = sums.index_add(0, flat, finite.expand(batch, -1, -1).reshape(batch * groups, -1))
    sizes = torch.bincount(flat, minlength=batch * groups).clamp(min=1)
    means = (sums / sizes[:, None]).view(batch, groups, -1).masked_fill(~allowed, -torch.inf)
    uniform = allowed / allowed.sum(dim=1, keepdim=True)
    e = floor / open_.sum(dim=1).clamp(min=1)
    e = e.clamp(max=0.5)[:, None, None]
    return (1 - e) * torch.softmax(means, dim=2) + e * uniform
