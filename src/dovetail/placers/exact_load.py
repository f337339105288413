"""The `load` objective as a CP-SAT model.

    min L   with, for every device d that counts,
    L >= sum_g work(g, d) x(g, d) + sum of its hops
    hop(net, from a to d) >= x(source, a) + x(target, d) - 1                 linked devices
    hop(net, from a to host) >= x(source, a) + x(target, d) - 1              for every d that a has
    hop(net, from host to d) >= x(source, a) + x(target, d) - 1              no link to

where x(g, d) says that group g is on device d. Sources that reach d through the host alike share
their last hop, so a machine whose accelerators meet at the host only needs two literals a net and
device: the model of section 3 of the paper below.

Paper: Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators",
NeurIPS 2020, https://arxiv.org/abs/2006.16423. Differences: any links; alike devices ordered;
integers, rounded down, so that the bound holds.
"""

from collections import defaultdict

from ortools.sat.python import cp_model

from dovetail.placers.exact_master import Master, add_hop, new_master
from dovetail.placers.problem import Problem

Terms = defaultdict[int, list[cp_model.LinearExprT]]


def load_master(problem: Problem, scale_seconds: float) -> Master:
    """The model; O(nets x devices^2) literals at most."""
    master = new_master(problem, scale_seconds)
    load = problem.load
    terms: Terms = defaultdict(list)
    for group, at in enumerate(master.at):
        for device, literal in at.items():
            terms[device].append(master.units(load.work_seconds[group, device]) * literal)
    for net in range(len(load.net_sources)):
        _add_net(master, net, terms)
    for device in range(load.devices):
        if load.counted[device] and terms[device]:
            master.model.add(sum(terms[device]) <= master.objective)
            master.terms = max(master.terms, len(terms[device]))
    return master


def _add_net(master: Master, net: int, terms: Terms) -> None:
    load = master.problem.load
    source, host = int(load.net_sources[net]), load.host
    targets = load.net_targets[load.net_offsets[net] : load.net_offsets[net + 1]].tolist()
    homes = {host} if source < 0 else set(master.at[source])
    ends = {d for target in targets for d in master.at[target]}
    for a in sorted(homes):
        direct = {d for d in ends - {a, host} if load.linked[a, d]}
        for d in sorted(direct):
            _add(master, net, (a, d), ({a}, {d}), terms)
        if a != host:
            # Once, however many lie behind it, and whether it stays or goes on.
            _add(master, net, (a, host), ({a}, ends - direct - {a}), terms)
    for d in sorted(ends - {host}):
        relayed = {a for a in homes - {d} if not load.linked[a, d]}
        if relayed:
            _add(master, net, (host, d), (relayed, {d}), terms)


def _add(
    master: Master,
    net: int,
    link: tuple[int, int],
    when: tuple[set[int], set[int]],
    terms: Terms,
) -> None:
    """Count one hop of a net over `link` on both ends, if it is worth a unit there."""
    load = master.problem.load
    units = master.units(
        load.net_sends[net] * load.latency_seconds[link]
        + load.net_bytes[net] * load.seconds_per_byte[link]
    )
    ends = [device for device in link if load.counted[device]]
    if not units or not ends or not when[1]:
        return
    source = int(load.net_sources[net])
    targets = load.net_targets[load.net_offsets[net] : load.net_offsets[net + 1]].tolist()
    literal = add_hop(master, source, targets, *when)
    if literal is not None:
        for device in ends:
            terms[device].append(units * literal)
