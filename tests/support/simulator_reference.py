"""The simulator's rules in plain Python, slowly: sets, dicts and lists, everything recomputed.

Nothing is counted down: what is ready, what is queued and who still uses a memory is found anew by
looking at all that has happened. Times are exact floats, so results compare with `==`.
"""

from dataclasses import dataclass, field

from dovetail.graph import EVERYWHERE, HOST


@dataclass
class Reference:
    """spans op -> (device, start, end); transfers (tensor, op, source, destination, channel, start,
    end); memory per device as a list of (time, bytes); peaks per device; stuck: ops never ran."""

    spans: dict = field(default_factory=dict)
    transfers: list = field(default_factory=list)
    memory: list = field(default_factory=list)
    peaks: list = field(default_factory=list)
    step_seconds: float = 0.0
    stuck: bool = False


class Run:
    def __init__(self, graph, machine, costs, placement, priorities, orders, schedules):
        self.graph, self.machine, self.costs = graph, machine, costs
        self.devices = range(len(machine.devices))
        self.host = machine.host_index
        self.priorities = priorities
        self.home = {}
        for op in range(len(graph)):
            residence = int(graph.residences[op])
            if not graph.is_source[op]:
                self.home[op] = int(placement[op])
            elif residence == HOST:
                self.home[op] = self.host
            else:
                self.home[op] = EVERYWHERE if residence == EVERYWHERE else int(placement[residence])
        self.stages = {}  # device -> [(ops, seconds)] still to start
        for device in self.devices:
            if schedules is not None and schedules[device] is not None:
                self.stages[device] = [(s.ops, s.seconds) for s in schedules[device].stages]
            elif orders is not None and orders[device] is not None:
                cost = costs.compute_seconds
                self.stages[device] = [((o,), float(cost[o, device])) for o in orders[device]]
        self.in_stage = {
            op: set(ops) for stages in self.stages.values() for ops, _ in stages for op in ops
        }
        self.ended = {op: 0.0 for op in range(len(graph)) if graph.is_source[op]}
        self.started = dict(self.ended)
        self.running = {}  # device -> (end, ops)
        self.carrying = {}  # channel -> transfer being carried
        self.queued = []  # transfers not started
        self.kept = {}  # device, or ("thread", host) -> until when it is kept from its next work
        self.sends = {}  # (unit, destination) -> transfer, ever queued
        self.result = Reference(memory=[[] for _ in self.devices], peaks=[0 for _ in self.devices])

    # -- what is where ---------------------------------------------------------------------------
    def made_on(self, tensor):
        return self.home[int(self.graph.producers[tensor])]

    def readers_on(self, tensor, device):
        return [int(o) for o in self.graph.consumers_of(tensor) if self.home[int(o)] == device]

    def is_here(self, tensor, device):
        producer = int(self.graph.producers[tensor])
        if self.home[producer] == EVERYWHERE:
            return True
        if self.home[producer] == device:
            return producer in self.ended
        return self.arrived(tensor, device)

    def arrived(self, unit, device):
        transfer = self.sends.get((unit, device))
        return transfer is not None and transfer["done"]

    def waits(self, op):
        device, inside = self.home[op], self.in_stage.get(op, {op})
        for tensor in self.graph.inputs_of(op).tolist():
            if int(self.graph.producers[tensor]) not in inside and not self.is_here(tensor, device):
                return True
        for before, after in self.graph.control.tolist():
            if after != op or before in inside:
                continue
            if self.home[before] == device:
                if before not in self.ended:
                    return True
            elif not self.arrived(self.graph.tensors + before, device):
                return True
        return False

    # -- transfers -------------------------------------------------------------------------------
    def next_hop(self, source, destination):
        direct = self.machine.link_index[source, destination] >= 0
        return destination if direct else self.host

    def targets(self, unit):
        if unit < self.graph.tensors:
            return {self.home[int(o)] for o in self.graph.consumers_of(unit)}
        op = unit - self.graph.tensors
        return {self.home[after] for before, after in self.graph.control.tolist() if before == op}

    def queue(self, unit, source, destination, now):
        if (unit, destination) in self.sends:
            return
        link = self.machine.links[int(self.machine.link_index[source, destination])]
        size = int(self.graph.tensor_bytes[unit]) if unit < self.graph.tensors else 0
        seconds = link.latency_seconds + size / link.bandwidth_bytes_per_second
        transfer = {
            "unit": unit, "source": source, "destination": destination, "ready": now,
            "channel": self.machine.channels.index(link.channel), "seconds": seconds, "link": link,
            "started": False, "done": False, "end": None,
        }  # fmt: skip
        self.sends[unit, destination] = transfer
        self.queued.append(transfer)

    def queue_from(self, unit, home, now):
        for destination in sorted(self.targets(unit) - {home}):
            self.queue(unit, home, self.next_hop(home, destination), now)

    def queue_onwards(self, unit, home, now):
        for destination in sorted(self.targets(unit) - {home, self.host}):
            if self.next_hop(home, destination) == self.host:
                self.queue(unit, self.host, destination, now)

    # -- memory, recounted from nothing ----------------------------------------------------------
    def root(self, tensor, device):
        """The tensor whose memory a copy of `tensor` uses on `device`."""
        base = int(self.graph.bases[tensor])
        if self.made_on(tensor) == device and base >= 0:
            return self.root(base, device)
        return tensor

    def in_use(self, tensor, device):
        """True while the copy of one alias on a device has a user left, or is to be made."""
        graph, producer = self.graph, int(self.graph.producers[tensor])
        home = self.home[producer]
        users = set(self.readers_on(tensor, device))
        if home == device:
            if tensor in graph.outputs:
                return True
            if producer not in self.ended:
                return True
            hops = {self.next_hop(device, d) for d in self.targets(tensor) - {device}}
        else:
            if not self.sends[tensor, device]["done"]:
                return True
            hops = set()
            if device == self.host:
                far = self.targets(tensor) - {home, device}
                hops = {d for d in far if self.next_hop(home, d) == device}
        return any(op not in self.ended for op in users) or any(
            not self.arrived(tensor, hop) for hop in hops
        )

    def bytes_on(self, device):
        graph, total = self.graph, 0
        roots = {}
        for tensor in range(graph.tensors):
            home = self.made_on(tensor)
            sent = self.sends.get((tensor, device))
            if home == device or (sent is not None and sent["started"]):
                roots.setdefault(self.root(tensor, device), []).append(tensor)
            elif home == EVERYWHERE and self.readers_on(tensor, device):
                roots.setdefault(tensor, []).append(tensor)
        for root, aliases in roots.items():
            producer = int(graph.producers[root])
            home = self.home[producer]
            if home == device and producer not in self.started:
                continue
            if home not in (device, EVERYWHERE):
                sent = self.sends.get((root, device))
                if sent is None or not sent["started"]:
                    continue  # only views of it are made here, later
            resident = graph.is_source[producer] and int(graph.residences[producer]) != HOST
            kept = resident and home in (device, EVERYWHERE)
            if kept or any(self.in_use(tensor, device) for tensor in aliases):
                total += int(graph.tensor_bytes[root])
        return total

    def note_memory(self, now):
        for device in self.devices:
            used, log = self.bytes_on(device), self.result.memory[device]
            if not log or log[-1][1] != used:
                log.append((now, used))
            self.result.peaks[device] = max(self.result.peaks[device], used)

    def carrier(self, channel):
        """The device that is this channel, or None."""
        name, devices = self.machine.channels[channel], self.machine.device_names
        return devices.index(name) if name in devices else None

    # -- whom messages keep busy ----------------------------------------------------------------
    def who(self, device):
        record = self.machine.devices[device]
        return ("thread", record.host) if record.kind == "gpu" else device

    def leaves(self, transfer, now):
        """When a transfer that starts leaves, after whoever sends it has done so."""
        seconds = transfer["link"].send_seconds
        if seconds == 0:
            return now
        source, destination = transfer["source"], transfer["destination"]
        sender, receiver = self.who(source), self.who(destination)
        hosts = [self.machine.devices[device].host for device in (source, destination)]
        if isinstance(receiver, tuple) and hosts[0] == hosts[1]:
            sender = receiver
        if sender == source:
            self.kept[source] = max(now, self.kept.get(source, 0.0)) + seconds
            return now
        self.kept[sender] = self.kept.get(sender, 0.0) + seconds
        return max(now, self.kept[sender])

    def receive(self, transfer, now):
        who = self.who(transfer["destination"])
        if isinstance(who, tuple) or self.kept.get(who, 0.0) > now:
            self.kept[who] = self.kept.get(who, 0.0) + transfer["link"].receive_seconds

    # -- time ------------------------------------------------------------------------------------
    def start_channels(self, now):
        for channel in range(len(self.machine.channels)):
            waiting = [t for t in self.queued if t["channel"] == channel]
            if channel in self.carrying or not waiting or self.carrier(channel) in self.running:
                continue
            first = min(waiting, key=lambda t: (t["ready"], t["unit"], t["destination"]))
            self.queued.remove(first)
            start = self.leaves(first, now)
            first["started"], first["end"] = True, start + first["seconds"]
            self.carrying[channel] = first
            unit, tensors = first["unit"], self.graph.tensors
            carried = unit < tensors
            op = int(self.graph.producers[unit]) if carried else unit - tensors
            ends = (first["source"], first["destination"], channel, start, first["end"])
            self.result.transfers.append((unit if carried else -1, op, *ends))

    def start_devices(self, now):
        for device in self.devices:
            if device in self.running or device in map(self.carrier, self.carrying):
                continue
            if device in self.stages:
                if not self.stages[device]:
                    continue
                ops, seconds = self.stages[device][0]
                if any(self.waits(op) for op in ops):
                    continue
                self.stages[device].pop(0)
            else:
                here = [o for o, d in self.home.items() if d == device and o not in self.started]
                ready = [o for o in here if not self.waits(o)]
                if not ready:
                    continue
                op = min(ready, key=lambda o: (-self.priorities[o], o))
                ops, seconds = (op,), float(self.costs.compute_seconds[op, device])
            start = max(now, self.kept.get(device, 0.0))
            self.kept[device] = start + seconds
            self.running[device] = (start + seconds, ops)
            for op in ops:
                self.started[op] = now
                self.result.spans[op] = (device, start, start + seconds)

    def end_everything(self, now):
        ops = [o for end, group in self.running.values() if end == now for o in group]
        self.running = {d: r for d, r in self.running.items() if r[0] != now}
        transfers = [t for t in self.carrying.values() if t["end"] == now]
        self.carrying = {c: t for c, t in self.carrying.items() if t["end"] != now}
        for op in sorted(ops):
            self.end_op(op, now)
        for transfer in sorted(transfers, key=lambda t: (t["unit"], t["destination"])):
            transfer["done"] = True
            self.receive(transfer, now)
            unit, tensors = transfer["unit"], self.graph.tensors
            home = self.made_on(unit) if unit < tensors else self.home[unit - tensors]
            if transfer["destination"] == self.host:
                self.queue_onwards(unit, home, now)

    def end_op(self, op, now):
        self.ended[op] = now
        if self.home[op] == EVERYWHERE:
            return
        for tensor in self.graph.outputs_of(op):
            self.queue_from(tensor, self.home[op], now)
        self.queue_from(self.graph.tensors + op, self.home[op], now)

    def run(self):
        now = 0.0
        ended, self.ended = self.ended, {}
        for device in self.devices:  # sources are there before even those nobody wants are freed
            used = sum(
                int(self.graph.tensor_bytes[t])
                for t in range(self.graph.tensors)
                if self.graph.is_source[self.graph.producers[t]]
                and (
                    self.made_on(t) == device
                    or (self.made_on(t) == EVERYWHERE and self.readers_on(t, device))
                )
            )
            self.result.memory[device].append((0.0, used))
            self.result.peaks[device] = used
        for op in sorted(ended):
            self.end_op(op, 0.0)
        while True:
            self.start_channels(now)
            self.start_devices(now)
            self.note_memory(now)
            ends = [end for end, _ in self.running.values()]
            ends += [transfer["end"] for transfer in self.carrying.values()]
            if not ends:
                break
            now = min(ends)
            self.end_everything(now)
        self.result.step_seconds = now
        self.result.stuck = len(self.ended) < len(self.graph)
        return self.result


def reference(graph, machine, costs, placement, priorities=None, orders=None, schedules=None):
    """Simulate one step by the rules, slowly."""
    if priorities is None:
        priorities = [0.0] * len(graph)
    return Run(graph, machine, costs, placement, priorities, orders, schedules).run()
