"""`dovetail machine`, `networks` and `capture`: show what can be planned for, and save graphs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.cli.arguments import (
    Asynchronous,
    Model,
    Replicas,
    Shape,
    Train,
    check_outputs,
    resolve,
)
from dovetail.cli.output import progress_bar, say, show, write
from dovetail.errors import MachineError, UsageError
from dovetail.pipeline.requests import MACHINE_HELP

if TYPE_CHECKING:
    from dovetail.machine.gpus import GpuMeasurement


def machine(
    name: Annotated[str, typer.Argument(metavar="MACHINE", help=MACHINE_HELP)] = "here",
    out: Annotated[Path | None, typer.Option(help="Write it as TOML")] = None,
    fresh: Annotated[
        bool, typer.Option(help="Measure anew, even if the cache has the rates")
    ] = False,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Measure some sixty kinds of ops on each device, half a minute in all, and scale "
            "the cost model by them; --out keeps the result",
        ),
    ] = False,
    hosts: Annotated[
        bool,
        typer.Option(
            "--hosts",
            help="Under torchrun: the devices of all ranks as one machine, with the links between "
            "them measured",
        ),
    ] = False,
    presets: Annotated[
        bool, typer.Option("--presets", help="List the devices that can be named instead")
    ] = False,
) -> None:
    """Show a machine's devices and links. The rates of this machine are measured. Of its GPUs also
    matrix products, copies and peer access are shown, measured each time."""
    from dovetail.machine import save_machine
    from dovetail.pipeline import Notes, resolve_machine
    from dovetail.reports import gpus_table, machine_table, presets_table

    if presets:
        if name != "here" or out or fresh or hosts or calibrate:
            raise UsageError("--presets", "lists known devices; leave the rest out")
        show(presets_table())
        return
    if calibrate and fresh:
        raise UsageError("--calibrate", "takes what the cache has; leave --fresh out")
    if calibrate and hosts:
        raise UsageError("--calibrate", "measures one host; calibrate each by itself")
    notes = Notes()
    gpus: tuple[GpuMeasurement, ...] = ()
    if hosts:
        from dovetail.cli.using import launched_ranks
        from dovetail.pipeline.hosts import machine_of_hosts

        with launched_ranks() as ranks:
            if ranks is None:
                says = "joins the machines of several ranks; start one on each host by torchrun"
                raise UsageError("--hosts", says)
            # Rank 0 alone shows and writes the machine.
            tells = ranks.rank == 0
            if tells:
                check_outputs(out, inputs=[name])
            with progress_bar(is_shown=tells) as progress:
                found = machine_of_hosts(name, ranks, progress, fresh=fresh, notes=notes)
        if not tells:
            return
    else:
        check_outputs(out, inputs=[name])
        with progress_bar() as progress:
            found = resolve_machine(name, progress, fresh=fresh, notes=notes)
            if calibrate:
                from dovetail.pipeline.sources import calibrate_machine

                found = calibrate_machine(found, progress, notes)
            if any(device.torch_device for device in found.devices):
                # Imported here, because it imports torch.
                from dovetail.machine.gpu_rates import measure_gpus

                progress("measuring the GPUs", 0.0, None)
                try:
                    gpus = measure_gpus(found)
                except MachineError as error:  # the machine itself is shown all the same
                    notes.say(f"the GPUs were not measured: {error}")
    show(machine_table(found))
    if gpus:
        show("")
        show(gpus_table(gpus))
    for note in notes.texts:
        say(note)
    write(out, lambda path: save_machine(found, path))


def networks(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="Show this network's options instead")
    ] = "",
) -> None:
    """List the built-in networks with their default sizes: FLOPs and ops of an inference step, and
    ops of a training step. With NAME, show one network and its options."""
    from dovetail.frontends.models import describe_network, network_rows
    from dovetail.reports import network_table, networks_table

    if name:
        show(network_table(*describe_network(name)))
    else:
        show(networks_table(network_rows()))


def capture(
    model: Model,
    out: Annotated[Path, typer.Option(help="Write the graph: .json or .json.gz")],
    train: Train = "",
    replicas: Replicas = 1,
    asynchronous: Asynchronous = False,
    shape: Shape = None,
) -> None:
    """Capture a network as a graph and save it."""
    from dovetail.graph import save_graph
    from dovetail.instances import Instance
    from dovetail.pipeline import check_replicas, graph_of, replicated
    from dovetail.reports import graph_summary

    check_outputs(out, inputs=[model])
    check_replicas(replicas, asynchronous)
    step = resolve(model, train, shape)
    if isinstance(step, Instance):
        raise UsageError("MODEL", f"{model} is an instance; it is planned for as it is")
    graph = graph_of(replicated(step, replicas, asynchronous))
    save_graph(graph, out)
    show(graph_summary(graph))
    say(f"wrote {out}")
