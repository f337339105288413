"""Encodings of commits: their sizes, their errors, and what is no encoding."""

import numpy as np
import pytest

from dovetail.errors import UsageError
from dovetail.training.wire import make_wire

SIZE = 1003


def sample(kind=np.float32):
    rng = np.random.default_rng(5)
    return (rng.standard_normal(SIZE) * 10.0 ** rng.integers(-3, 3, SIZE)).astype(kind)


def through(wire, vector):
    octets = np.zeros(wire.size_bytes, np.uint8)
    wire.encode(vector, octets)
    decoded = np.full_like(vector, 7)
    assert wire.decode(octets, decoded)
    return decoded


@pytest.mark.parametrize(
    ("name", "size_bytes", "error"),
    [("none", 4 * SIZE, 0.0), ("float16", 2 * SIZE, 2.0**-11), ("bfloat16", 2 * SIZE, 2.0**-8)],
)
def test_rounding_errors_are_within_half_a_unit(name, size_bytes, error):
    wire, vector = make_wire(name, SIZE, "float32"), sample()
    assert wire.size_bytes == size_bytes
    # Below 6e-5 float16 has a fixed spacing of 2^-24.
    bound = error * np.abs(vector) * (1 + 1e-6) + (2.0**-25 if name == "float16" else 0)
    assert (np.abs(through(wire, vector) - vector) <= bound).all()


@pytest.mark.parametrize("name", ["none", "float16", "bfloat16", "topk:1"])
def test_float64_goes_the_same_way(name):
    vector = sample(np.float64)
    decoded = through(make_wire(name, SIZE, "float64"), vector)
    np.testing.assert_allclose(decoded, vector, rtol=2.0**-8, atol=2.0**-24)
    assert decoded.dtype == np.float64


def test_bfloat16_rounds_ties_to_even_and_keeps_what_is_not_finite():
    bits = np.array(
        [0x3F808000, 0x3F818000, 0x3F808001, 0x7F800001, 0xFF800000, 0x80000000, 0x7F7FFFFF],
        np.uint32,
    )
    decoded = through(make_wire("bfloat16", bits.size, "float32"), bits.view(np.float32))
    found = [f"{word:08x}" for word in decoded.view(np.uint32)]
    assert found == [
        "3f800000",  # a tie, to the even one below
        "3f820000",  # a tie, to the even one above
        "3f810000",
        "7fc00000",  # the smallest nan stays one
        "ff800000",
        "80000000",
        "7f800000",  # the largest float32 rounds to infinity
    ]


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_nan_and_infinity_arrive_as_what_they_are(name):
    vector = np.array([np.nan, np.inf, -np.inf, 0.0], np.float32)
    np.testing.assert_array_equal(through(make_wire(name, 4, "float32"), vector), vector)


def test_float16_makes_infinity_of_what_is_too_large_for_it():
    assert np.isinf(through(make_wire("float16", 1, "float32"), np.array([7e4], np.float32))[0])


def test_the_largest_components_travel_and_the_rest_comes_later():
    wire = make_wire("topk:0.4", 5, "float32")
    assert wire.size_bytes == 2 * 8
    first = through(wire, np.array([5, -7, 1, 2, 3], np.float32))
    np.testing.assert_array_equal(first, [5, -7, 0, 0, 0])
    second = through(wire, np.array([1, 1, 1, 1, 1], np.float32))
    np.testing.assert_array_equal(second, [0, 0, 0, 3, 4])
    third = through(wire, np.zeros(5, np.float32))
    assert (first + second + third).sum() == 5 - 7 + 1 + 2 + 3 + 5 - 1  # one is still to come


def test_nothing_is_lost_for_good():
    wire, total, sent = make_wire("topk:0.1", SIZE, "float64"), 0.0, 0.0
    for seed in range(40):
        vector = np.random.default_rng(seed).standard_normal(SIZE)
        total, sent = total + vector, sent + through(wire, vector)
    for _ in range(11):
        sent = sent + through(wire, np.zeros(SIZE))
    np.testing.assert_allclose(sent, total, atol=1e-12)


def test_a_vector_that_is_not_finite_leaves_nothing_behind():
    wire = make_wire("topk:0.25", 4, "float32")
    assert np.isnan(through(wire, np.array([np.nan, np.nan, 1, 1], np.float32))).any()
    np.testing.assert_array_equal(through(wire, np.array([0, 0, 1, 0], np.float32)), [0, 0, 1, 0])


@pytest.mark.parametrize("name", ["none", "float16", "bfloat16", "topk:0.5"])
def test_bytes_of_another_length_are_no_encoding(name):
    wire = make_wire(name, 4, "float32")
    assert not wire.decode(np.zeros(wire.size_bytes - 1, np.uint8), np.zeros(4, np.float32))


@pytest.mark.parametrize("indices", [(0, 4), (1, 1), (2, 1)])
def test_indices_outside_or_out_of_order_are_no_encoding(indices):
    wire, octets = make_wire("topk:0.5", 4, "float32"), np.zeros(16, np.uint8)
    octets[8:].view(np.uint32)[:] = indices
    assert not wire.decode(octets, np.zeros(4, np.float32))


@pytest.mark.parametrize("name", ["float8", "topk", "topk:0", "topk:2", "topk:x", "none:1"])
def test_other_names_are_refused(name):
    with pytest.raises(UsageError) as caught:
        make_wire(name, 4, "float32")
    assert caught.value.option == "wire"
