"""Checksums of pieces against that of the whole, and sums of squares."""

import numpy as np
import pytest
import xxhash

from dovetail.training.checks import PIECE_BYTES, check, checksum, copy_and_checksum


def whole(array):
    """XXH3 of the array's bytes in one call."""
    return xxhash.xxh3_64_intdigest(array.tobytes())


PIECE = PIECE_BYTES // 4


@pytest.mark.parametrize("size", [0, 1, 7, 17, 1000, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_a_check_is_the_checksum_and_the_sum_of_squares(size, kind):
    vector = np.random.default_rng(size).standard_normal(size).astype(kind)
    found = check(vector)
    assert found.checksum == checksum(vector) == whole(vector)
    assert found.squares == pytest.approx(np.square(vector.astype(np.float64)).sum(), rel=1e-14)
    assert found.norm == pytest.approx(np.linalg.norm(vector.astype(np.float64)), rel=1e-14)


@pytest.mark.parametrize("size", [3, 100, PIECE + 1])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_a_copy_has_the_checksum_of_its_source(size, kind):
    source = np.random.default_rng(1).standard_normal(size).astype(kind)
    target = np.zeros(size + 1, kind)
    assert copy_and_checksum(target[:-1], source) == checksum(source)
    assert (target[:-1] == source).all()
    assert target[-1] == 0


@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_bytes_of_any_length_at_any_place_have_a_checksum(shift):
    octets = np.random.default_rng(2).integers(0, 256, 203, np.uint8)[shift:]
    assert checksum(octets) == whole(octets)


def test_every_flipped_bit_is_seen():
    vector = np.random.default_rng(3).standard_normal(50).astype(np.float32)
    expected, octets = checksum(vector), vector.view(np.uint8)
    for place in range(octets.size):
        for bit in range(8):
            octets[place] ^= 1 << bit
            assert checksum(vector) != expected
            octets[place] ^= 1 << bit
    assert checksum(vector) == expected


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_every_two_words_that_change_places_are_seen(kind):
    # Signs and powers of two only: differences that vanish where sums wrap around.
    vector = np.array([1, -1, 2, -2, 0, -0.0, 0.5, np.inf] * 5, kind)
    expected = checksum(vector)
    words = vector.view(np.uint32)
    for i in range(words.size):
        for j in range(i):
            if words[i] != words[j]:
                words[[i, j]] = words[[j, i]]
                assert checksum(vector) != expected
                words[[i, j]] = words[[j, i]]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_one_component_that_is_not_finite_makes_the_vector_so(value, kind):
    for place in (0, 37, 99):
        vector = np.ones(100, kind)
        assert check(vector).finite
        vector[place] = value
        assert not check(vector).finite


def test_the_largest_and_the_smallest_float32_are_squared_exactly_enough():
    large = np.full(40, np.finfo(np.float32).max)
    assert check(large).norm == pytest.approx(float(large[0]) * 40**0.5)
    small = np.full(40, 1e-38, np.float32)
    assert check(small).norm == pytest.approx(float(small[0]) * 40**0.5)
