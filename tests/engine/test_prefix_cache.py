"""What a page is known by, and which known page is given up first."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt_jax.engine.prefix_cache import PrefixCache, page_hashes

# -- hashes --------------------------------------------------------------------------------------


def test_a_page_is_known_by_a_sha256_digest_of_the_page_before_it_and_of_its_tokens():
    first = hashlib.sha256(hashlib.sha256(b"").digest() + np.array([1, 2], "<i4").tobytes())
    second = hashlib.sha256(first.digest() + np.array([3, 4], "<i4").tobytes())
    assert page_hashes([1, 2, 3, 4], 2, None) == (first.digest(), second.digest())


@pytest.mark.parametrize(
    ("tokens", "pages"), [(0, 0), (1, 0), (3, 0), (4, 1), (7, 1), (8, 2), (401, 100)]
)
def test_only_full_pages_have_a_hash(tokens, pages):
    assert len(page_hashes([5] * tokens, 4, None)) == pages


def test_the_same_tokens_after_different_beginnings_are_different_pages():
    one = page_hashes([1, 2, 3, 4, 5, 6, 7, 8], 4, None)
    other = page_hashes([1, 2, 3, 9, 5, 6, 7, 8], 4, None)
    repeated = page_hashes([5, 6, 7, 8, 5, 6, 7, 8], 4, None)
    assert len({*one, *other, *repeated}) == 6


def test_the_same_beginning_is_the_same_pages_whatever_follows():
    assert page_hashes(range(12), 4, None)[:2] == page_hashes([*range(8), 90, 91], 4, None)


def test_salts_part_requests_of_the_same_tokens():
    salts = (None, "None", "a", "b", "ab", "\0", "é", "\ud800")
    hashes = [page_hashes(range(8), 4, salt) for salt in salts]
    assert len({one for pages in hashes for one in pages}) == 2 * len(salts)
    assert page_hashes(range(8), 4, "a") == hashes[2]


def test_pages_of_other_sizes_are_others_though_they_end_at_the_same_token():
    small, large = page_hashes(range(8), 4, None), page_hashes(range(8), 8, None)
    assert not set(small) & set(large)


def test_every_byte_of_a_token_counts():
    tokens = [0, 1, 2**8, 2**16, 2**24, 2**31 - 1, 2**31 - 2]
    assert len({page_hashes([token], 1, None) for token in tokens}) == len(tokens)
    assert page_hashes([1, 0], 2, None) != page_hashes([0, 1], 2, None)


def test_a_token_that_is_no_int32_has_no_hash():
    with pytest.raises(OverflowError):
        page_hashes([2**31], 1, None)


tokens = st.lists(st.sampled_from([0, 1, 2**8, 2**31 - 1]), max_size=9)
salts = st.sampled_from([None, "a"])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(one=tokens, other=tokens, salt=salts, other_salt=salts, size=st.integers(1, 3))
def test_pages_are_the_same_exactly_where_all_tokens_up_to_their_ends_are(
    one, other, salt, other_salt, size
):
    hashes, others = page_hashes(one, size, salt), page_hashes(other, size, other_salt)
    for i, (left, right) in enumerate(zip(hashes, others)):
        end = (i + 1) * size
        assert (left == right) == ((salt, one[:end]) == (other_salt, other[:end]))


# -- what is known -------------------------------------------------------------------------------


def known(**pages: int) -> PrefixCache:
    """Pages by the names of what they hold, nobody's, in this order of use."""
    cache = PrefixCache()
    for name, page in pages.items():
        assert cache.put(name.encode(), page)
        assert cache.let_go(page)
    return cache


def test_find_gives_the_longest_known_prefix():
    cache = known(a=7, b=5, d=3)
    assert cache.find([b"a", b"b", b"c", b"d"]) == (7, 5)
    assert cache.find([b"a", b"b"]) == (7, 5)
    assert cache.find([b"c", b"a"]) == ()
    assert cache.find([]) == ()


def test_of_two_pages_that_hold_the_same_one_is_known():
    cache = known(a=7)
    assert not cache.put(b"a", 8)
    assert cache.find([b"a"]) == (7,)
    assert not cache.let_go(8)  # free: nobody knows it
    assert cache.num_idle == 1


def test_the_page_used_longest_ago_is_given_up_first_and_not_known_any_more():
    cache = known(a=7, b=5, c=3)
    cache.take(7)
    assert not cache.is_idle(7) and cache.is_idle(5)
    cache.let_go(7)  # used again
    assert [cache.evict(), cache.evict(), cache.evict()] == [5, 3, 7]
    assert cache.find([b"b"]) == cache.find([b"a"]) == ()
    assert cache.num_idle == 0


def test_a_page_that_somebody_holds_is_not_given_up():
    cache = known(a=7, b=5)
    cache.take(7)
    assert cache.evict() == 5
    with pytest.raises(KeyError):
        cache.evict()
    assert cache.find([b"a"]) == (7,)


def test_a_page_given_up_may_come_to_hold_something_else():
    cache = known(a=7)
    assert cache.evict() == 7
    assert cache.put(b"b", 7) and cache.put(b"a", 8)
    assert cache.find([b"a"]) == (8,) and cache.find([b"b"]) == (7,)
