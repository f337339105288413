"""Small ONNX files for the tests."""

import numpy as np
from onnx import TensorProto, helper, numpy_helper, save

OPSET = 20
FLOAT = TensorProto.FLOAT


def tensor(name, array):
    """An initializer of an array."""
    return numpy_helper.from_array(np.asarray(array), name)


def floats(name, *shape):
    """An initializer of float32 ones."""
    return tensor(name, np.ones(shape, np.float32))


def declared(name, shape, code=FLOAT):
    """An input or output; None for an open axis, a text for a named one."""
    return helper.make_tensor_value_info(name, code, shape)


def node(kind, inputs, outputs, name="", domain="", **attributes):
    """A node; names of inputs and outputs as one text, between spaces, "-" for one left out."""
    inputs = ["" if word == "-" else word for word in inputs.split()]
    return helper.make_node(
        kind, inputs, outputs.split(), name=name, domain=domain or None, **attributes
    )


def model_of(nodes, inputs, outputs="y", weights=(), *, opsets=(("", OPSET),), functions=()):
    """A model. inputs: {name: shape or (shape, code)}; outputs between spaces."""
    given = [
        declared(name, *(what if isinstance(what, tuple) else (what,)))
        for name, what in inputs.items()
    ]
    graph = helper.make_graph(
        nodes, "graph", given, [helper.ValueInfoProto(name=n) for n in outputs.split()], weights
    )
    imports = [helper.make_opsetid(*opset) for opset in opsets]
    return helper.make_model(graph, opset_imports=imports, functions=functions)


def write(path, *arguments, **options):
    """The path of a file with the model of `model_of`."""
    save(model_of(*arguments, **options), path)
    return path


def external(name, shape, location, code=FLOAT, **entries):
    """An initializer whose bytes are in another file."""
    held = TensorProto(name=name, data_type=code, dims=shape, data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, **entries}.items():
        held.external_data.add(key=key, value=str(value))
    return held
