"""PackedLayout: what is packed comes out bit for bit, in a program and from one."""

import jax
import numpy as np
import pytest

from rlt_jax.runtime.packed import (
    PackedLayout,
    mixed_layout,
    prompt_layout,
    result_layout,
    row_layout,
    shared_prompt_layout,
    slot_layout,
)

F32, I32, U32, BOOL = np.float32, np.int32, np.uint32, np.bool_

LAYOUTS = {
    "row": row_layout(3),
    "prompt": prompt_layout(16, 3),
    "mixed": mixed_layout(2, 16, 3),
    "shared prompt": shared_prompt_layout(2, 16),
    "slot": slot_layout(4, 5),
    "signals": result_layout(5, signal="exit_probability"),
    "tokens and decisions": result_layout(5, tokens=2, signal="leaves"),
    "nothing for the host": result_layout(5),
    "one of each": PackedLayout(
        (("f", (), F32), ("i", (1,), I32), ("u", (2, 3, 4), U32), ("b", (2, 2), BOOL))
    ),
    "an empty field": PackedLayout((("a", (2,), U32), ("none", (0, 3), F32), ("b", (1,), F32))),
}
EDGE_BITS = np.array(
    [
        0x00000000,
        0x80000000,  # -0.0, or the least int32
        0x7FC00000,  # NaN
        0xFFC12345,  # NaN, signed and with a payload
        0x7F800001,  # signalling NaN
        0x7F800000,  # inf
        0x00000001,  # denormal
        0x7FFFFFFF,
        0xFFFFFFFF,
    ],
    U32,
)


def all_layouts(test):
    return pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)(test)


def random_values(layout: PackedLayout, seed: int = 0) -> dict[str, np.ndarray]:
    """Fields of random and of special bit patterns."""
    rng = np.random.default_rng(seed)
    values = {}
    for name, shape, dtype in layout.fields:
        random = rng.integers(0, 2**32, shape, U32)
        special = rng.choice(EDGE_BITS, shape)
        words = np.where(rng.random(shape) < 0.5, random, special).astype(U32)
        values[name] = words % 2 == 1 if dtype is BOOL else words.view(dtype)
    return values


def words_of(value) -> list[int]:
    value = np.asarray(value)
    return (value.astype(U32) if value.dtype == BOOL else value.view(U32)).ravel().tolist()


def assert_fields(fields, values, layout: PackedLayout) -> None:
    assert fields.keys() == values.keys()
    for name, shape, dtype in layout.fields:
        field = np.asarray(fields[name])
        assert (field.shape, field.dtype) == (shape, np.dtype(dtype))
        assert words_of(field) == words_of(values[name])


@all_layouts
def test_unpack_gives_back_every_bit(layout):
    unpack = jax.jit(layout.unpack)
    for seed in range(5):
        values = random_values(layout, seed)
        assert_fields(unpack(layout.pack(values)), values, layout)


@all_layouts
def test_what_a_program_packs_the_host_unpacks_to_every_bit(layout):
    pack = jax.jit(layout.pack)
    for seed in range(5):
        values = random_values(layout, seed)
        packed = np.asarray(pack(values))
        assert packed.tolist() == layout.pack(values).tolist()
        assert_fields(layout.unpack(packed), values, layout)


@all_layouts
def test_the_host_unpacks_without_a_copy(layout):
    packed = layout.pack(random_values(layout))
    for name, field in layout.unpack(packed).items():
        assert isinstance(field, np.ndarray)
        if field.size and field.dtype != BOOL:  # a bool there takes a byte
            assert np.shares_memory(field, packed), name


@all_layouts
def test_packed_is_one_flat_int32_array_in_the_order_of_the_fields(layout):
    values = random_values(layout)
    packed = layout.pack(dict(reversed(values.items())))
    assert packed.dtype == np.int32 and packed.shape == (layout.size,)
    words = [word for name, _, _ in layout.fields for word in words_of(values[name])]
    assert packed.view(U32).tolist() == words


def test_sizes_by_hand():
    assert row_layout(8).size == 5 * 8
    assert prompt_layout(100, 7).size == 4 * 7 + 100
    assert mixed_layout(8, 100, 7).size == 3 * 8 + 6 * 7 + 100
    assert shared_prompt_layout(4, 16).size == 4 * 4 + 4 * 16
    assert slot_layout(8, 100).size == 8 * (1 + 100 + 1 + 1 + 1 + 2 + 1 + 1)
    assert result_layout(8, tokens=4, signal="leaves").size == 8 * (4 + 4 + 1)
    assert result_layout(8, signal="exit_probability").size == 8
    assert result_layout(8).size == 1  # shows that the program is done


def test_values_in_any_memory_order_keep_their_places():
    layout = LAYOUTS["one of each"]
    values = random_values(layout)
    packed = layout.pack(values)
    strided = np.repeat(values["u"], 2, axis=-1)[..., ::2]
    for u in (np.asfortranarray(values["u"]), strided, values["u"].astype(">u4")):
        assert np.array_equal(layout.pack({**values, "u": u}), packed)


def test_lists_and_wider_integers_are_taken():
    layout = row_layout(2)
    values = {
        "slot": [1, 2],
        "position": (3, 4),
        "depth": np.array([5, 6]),
        "exit_depth": np.array([7, 8], np.int64),
        "output_index": range(9, 11),
    }
    assert layout.pack(values).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


@all_layouts
def test_every_pack_is_a_fresh_array(layout):
    """An array in flight is never touched: not by a later pack, nor through its inputs."""
    values = random_values(layout)
    first, second = layout.pack(values), layout.pack(values)
    kept = first.copy()
    assert not np.shares_memory(first, second)
    for value in values.values():
        assert not np.shares_memory(first, value)
        value[...] = 0
    layout.pack(random_values(layout, seed=1))
    assert np.array_equal(first, kept) and np.array_equal(second, kept)


@all_layouts
def test_a_misshapen_field_is_refused_by_name(layout):
    values = random_values(layout)
    for name, shape, dtype in layout.fields:
        longer = [(length + 1, *shape[1:]) for length in shape[:1]]
        for wrong in [(*shape, 1), (7, *shape), *longer]:
            with pytest.raises(ValueError, match=f"^{name} has shape .*must be"):
                layout.pack({**values, name: np.zeros(wrong, dtype)})


@all_layouts
def test_a_missing_field_is_refused_by_name(layout):
    for name, _, _ in layout.fields:
        values = random_values(layout)
        del values[name]
        with pytest.raises(ValueError, match=name):
            layout.pack(values)
