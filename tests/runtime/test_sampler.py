"""Sampling: which tokens survive, what distribution is drawn from, and whose draw is whose.

Statistics use fixed seeds, so they come out the same every time; their bounds are quantiles that
a right sampler passes for all but 1 in 10,000 choices of seeds.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt_jax.runtime import sampler

VOCAB = 16
ROWS = 4096
HIGH = 2**32  # the step of a seed's high word

_sample = jax.jit(sampler.sample)
_kept = jax.jit(sampler.kept)
raw_logprob = jax.jit(sampler.raw_logprob)


def seed_words(seeds) -> np.ndarray:
    """Seeds below 2**64 as rows of a high and a low uint32 word."""
    seeds = np.asarray(seeds, np.uint64)
    return np.stack([seeds >> np.uint64(32), seeds & np.uint64(HIGH - 1)], -1).astype(np.uint32)


def sample(logits, *, seeds, temperature=1.0, top_k=-1, top_p=1.0, index=0) -> np.ndarray:
    """One draw for each seed; everything else is broadcast to their number."""
    rows = len(seeds)

    def column(value, dtype):
        return np.broadcast_to(np.asarray(value, dtype), (rows,)).copy()

    logits = np.asarray(logits, np.float32)
    token = _sample(
        np.broadcast_to(logits, (rows, logits.shape[-1])).copy(),
        column(temperature, np.float32),
        column(top_k, np.int32),
        column(top_p, np.float32),
        seed_words(seeds),
        column(index, np.int32),
    )
    assert token.dtype == jnp.int32
    return np.asarray(token)


def kept(sorted_logits, top_k=-1, top_p=1.0) -> list[int]:
    """Ranks that survive in one row."""
    row = np.asarray(sorted_logits, np.float32)[None]
    out = _kept(row, np.array([top_k], np.int32), np.array([top_p], np.float32))
    return np.flatnonzero(out[0]).tolist()


def random_logits(seed: int = 0, vocab: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=vocab).astype(np.float32) * 2


def softmax(logits) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def kept_exactly(sorted_logits, top_k: int, top_p: float) -> tuple[np.ndarray, float]:
    """The rule in float64, and how close to top_p any mass came."""
    logits = np.asarray(sorted_logits, np.float64)
    kth = logits[min(top_k, len(logits)) - 1] if top_k > 0 else -np.inf
    within_k = logits >= kth
    mass = softmax(np.where(within_k, logits, -np.inf))
    before = np.cumsum(mass) - mass
    within_p = (before <= top_p) | (top_p >= 1)
    return within_k & within_p, np.abs(before - top_p)[within_k].min()


# Upper 1e-4 quantile of chi-square (Wilson and Hilferty's approximation).
def chi_square_limit(freedom: int) -> float:
    t = 2 / (9 * freedom)
    return freedom * (1 - t + 3.719 * t**0.5) ** 3


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = counts.sum() * probabilities
    drawable = expected > 0
    assert not counts[~drawable].any()
    assert expected[drawable].min() >= 5
    return float(((counts - expected)[drawable] ** 2 / expected[drawable]).sum())


# --- which tokens survive ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "logits, top_k, top_p, survivors",
    [
        ([3, 2, 1, 0], 1, 1.0, 1),
        ([3, 2, 1, 0], 3, 1.0, 3),
        ([3, 2, 1, 0], 4, 1.0, 4),
        ([3, 2, 1, 0], 5, 1.0, 4),
        ([3, 2, 1, 0], 2**31 - 1, 1.0, 4),
        ([3, 2, 1, 0], -1, 1.0, 4),
        ([3, 2, 2, 2], 2, 1.0, 4),  # all ties of the 2nd
        ([3, 2, 2, 1], 2, 1.0, 3),
        ([3, 3, 3, 1], 1, 1.0, 3),  # all ties of the 1st
        ([3, 2, 1, -np.inf], 3, 1.0, 3),
        ([9, 2, 1, 0], -1, 1e-30, 1),
        ([3, 3, 3, 3], -1, 1e-30, 1),  # top_p, unlike top_k, has no ties
        ([3, 3, 3, 3], 2, 1e-30, 1),
        ([0, 0, 0, 0], -1, 0.2499, 1),
        ([0, 0, 0, 0], -1, 0.25, 2),  # the mass before the 2nd is 0.25: not more than top_p
        ([0, 0, 0, 0], -1, 0.5, 3),
        ([0, 0, 0, 0], -1, 0.75, 4),
        ([0, 0, 0, 0], -1, np.nextafter(np.float32(0.5), 0), 2),
        ([0, 0, 0, 0], -1, np.nextafter(np.float32(0.75), 0), 3),
        ([5, 5, -np.inf, -np.inf], -1, 0.5, 2),
        ([50, -60, -70, -80], -1, np.nextafter(np.float32(1), 0), 1),  # the rest has no mass
        ([50, -60, -70, -80], -1, 1.0, 4),  # top_p 1 keeps even that
        # 0.4, 0.3, 0.2, 0.1: of two, the first has 4/7 > 0.5; of all, 0.4 <= 0.5.
        (np.log([0.4, 0.3, 0.2, 0.1]), 2, 0.5, 1),
        (np.log([0.4, 0.3, 0.2, 0.1]), -1, 0.5, 2),
        (np.log([0.4, 0.3, 0.2, 0.1]), 2, 0.6, 2),
        (np.log([0.4, 0.3, 0.2, 0.1]), 3, 0.8, 3),  # before the 3rd 7/9; of all it would be 0.7
        (np.log([0.4, 0.3, 0.2, 0.1]), 3, 0.75, 2),
    ],
)
def test_survivors_by_hand(logits, top_k, top_p, survivors):
    assert kept(logits, top_k, top_p) == list(range(survivors))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    logits=st.lists(st.sampled_from([-9.0, -1.0, 0.0, 0.5, 2.0, 7.0]), min_size=8, max_size=8),
    top_k=st.sampled_from([-1, 1, 2, 3, 7, 8, 9]),
    top_p=st.floats(2.0**-10, 1, width=32),
)
def test_survivors_equal_the_rule_in_float64(logits, top_k, top_p):
    """Many ties; a mass within f32 rounding of top_p may fall on either side."""
    logits = -np.sort(-np.array(logits))
    expected, margin = kept_exactly(logits, top_k, top_p)
    if margin > 1e-6:
        assert kept(logits, top_k, top_p) == np.flatnonzero(expected).tolist()


def test_top_p_counts_right_in_a_large_vocabulary():
    """49,152 equal tokens: the sum of so many small masses must not drift."""
    for top_p in (0.1, 0.5, 0.9, 0.99):
        survivors = kept(np.zeros(49152), top_p=top_p)
        assert survivors == list(range(len(survivors)))
        assert abs(len(survivors) / 49152 - top_p) <= 1e-4


@pytest.mark.parametrize(
    "top_k, top_p", [(1, 1.0), (5, 1.0), (-1, 0.8), (5, 0.8), (VOCAB, 1e-6), (VOCAB + 9, 1.0)]
)
def test_draws_come_from_all_survivors_and_from_them_only(top_k, top_p):
    logits = random_logits(3) / 4  # no survivor is rarer than 1 %
    order = np.argsort(-logits)
    expected, _ = kept_exactly(logits[order], top_k, top_p)
    drawn = sample(logits, seeds=range(ROWS), top_k=top_k, top_p=top_p)
    assert set(drawn) == set(order[expected])


def test_top_p_1_keeps_everything_though_rounded_masses_sum_past_1():
    """Before the many tokens of next to no mass the f32 sum may be some ulps more than 1."""
    for seed in range(8):
        logits = -np.sort(-random_logits(seed, 49152) * 2)
        assert len(kept(logits, top_p=1.0)) == 49152


def test_of_equals_top_p_keeps_the_lowest_ids():
    """The order of ties is that of greedy."""
    logits = np.zeros(VOCAB)
    logits[[4, 9, 12]] = 30
    assert set(sample(logits, seeds=range(ROWS), top_p=1e-6)) == {4}
    assert set(sample(logits, seeds=range(ROWS), top_p=0.5)) == {4, 9}


def test_all_ties_of_the_kth_are_drawn():
    logits = np.full(VOCAB, -1.0)
    logits[[2, 7, 11, 13]] = [4, 3, 3, 3]
    assert set(sample(logits, seeds=range(ROWS), top_k=2)) == {2, 7, 11, 13}


# --- the distribution ----------------------------------------------------------------------------

# What tells one draw from the next: (seed, output index) of draw i.
STREAMS = {
    "low word of the seed": lambda i: (i, 0),
    "high word of the seed": lambda i: (i * HIGH + 5, 0),
    "output index": lambda i: (5, i),
    "both": lambda i: (i // 64 * (HIGH + 1), i % 64),
}
DISTRIBUTIONS = {
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1.5": {"temperature": 1.5},
    "top_k": {"temperature": 0.9, "top_k": 6},
    "top_p": {"temperature": 1.1, "top_p": 0.85},
    "top_k and top_p": {"temperature": 0.8, "top_k": 8, "top_p": 0.9},
}
DRAWS = 8 * ROWS


def draw_stream(stream: str, logits, draws: int = DRAWS, **options) -> np.ndarray:
    seeds, indices = zip(*map(STREAMS[stream], range(draws)))
    return np.concatenate(
        [
            sample(logits, seeds=seeds[i : i + ROWS], index=indices[i : i + ROWS], **options)
            for i in range(0, draws, ROWS)
        ]
    )


def exact_distribution(logits, temperature=1.0, top_k=-1, top_p=1.0) -> np.ndarray:
    scaled = np.asarray(logits, np.float64) / temperature
    order = np.argsort(-scaled)
    survivors, _ = kept_exactly(scaled[order], top_k, top_p)
    return softmax(np.where(np.isin(np.arange(scaled.size), order[survivors]), scaled, -np.inf))


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("options", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_draws_follow_the_exact_distribution(stream, options):
    logits = random_logits() / 2
    exact = exact_distribution(logits, **options)
    counts = np.bincount(draw_stream(stream, logits, **options), minlength=VOCAB)
    limit = chi_square_limit(np.count_nonzero(exact) - 1)
    assert chi_square(counts, exact) <= limit
    assert np.abs(counts / DRAWS - exact).max() <= 3.9 * (0.25 / DRAWS) ** 0.5
    # The same counts would not pass for a slightly different temperature.
    other = exact_distribution(logits, options["temperature"] * 1.1, options.get("top_k", -1))
    if "top_p" not in options:
        assert chi_square(counts, other) > limit


@pytest.mark.parametrize(
    "step", [(1, 0), (HIGH, 0), (HIGH + 1, 0), (2**62, 0), (0, 1), (0, 2), (1, -1)], ids=str
)
def test_neighbouring_streams_are_independent(step):
    """Pairs of draws, seeds or indices `step` apart: all 16 pairs of 4 even tokens are even."""
    logits = np.full(VOCAB, -np.inf)
    logits[:4] = 0
    seeds = np.arange(0, 8 * ROWS, 8, dtype=np.uint64)
    first = sample(logits, seeds=seeds, index=3)
    second = sample(logits, seeds=seeds + np.uint64(step[0]), index=3 + step[1])
    counts = np.bincount(first * 4 + second, minlength=16)
    assert chi_square(counts, np.full(16, 1 / 16)) <= chi_square_limit(15)


# --- whose draw is whose -------------------------------------------------------------------------

PROBES = [0, 1, 2**31, HIGH - 1, HIGH, HIGH + 1, 12345 * HIGH + 678, 2**62, 2**63 - 2, 2**63 - 1]


def categorical(logits, seed: int, index: int) -> int:
    key = jax.random.wrap_key_data(jnp.asarray(seed_words([seed])[0]), impl="threefry2x32")
    return int(jax.random.categorical(jax.random.fold_in(key, index), jnp.asarray(logits)))


def test_a_draw_is_jax_categorical_with_the_seed_as_key_and_the_index_folded_in():
    logits = random_logits()
    for index in (0, 1, 1000):
        expected = [categorical(logits, seed, index) for seed in PROBES]
        assert sample(logits, seeds=PROBES, index=index).tolist() == expected


def test_seeds_that_differ_in_one_word_draw_differently():
    """64 tokens in a row from even odds: equal sequences would need a chance of 16 ** -64."""

    def text(seed):
        return tuple(sample(np.zeros(VOCAB), seeds=[seed] * 64, index=np.arange(64)))

    texts = {seed: text(seed) for seed in PROBES}
    assert len(set(texts.values())) == len(PROBES)
    for a in PROBES:  # swapped words are another seed as well
        swapped = (a % HIGH) * HIGH + a // HIGH
        if swapped != a:
            assert text(swapped) != texts[a]
    assert text(2**63 - 1) == texts[2**63 - 1]


@pytest.mark.parametrize("rows", [2, 8, 64])
def test_a_draw_depends_on_no_neighbour_row_or_bucket(rows):
    rng = np.random.default_rng(rows)
    logits = rng.normal(size=(rows, VOCAB)).astype(np.float32)
    mine = logits[0].copy()
    own = {"temperature": 0.9, "top_k": 12, "top_p": 0.95}
    for index in range(12):
        seed = int(rng.integers(2**63))
        alone = sample(mine, seeds=[seed], index=index, **own)[0]
        at = int(rng.integers(rows))
        crowd = {
            "temperature": rng.choice([0, 1e-6, 0.5, 2], rows),
            "top_k": rng.choice([-1, 1, 3], rows),
            "top_p": rng.choice([0.1, 0.5, 1], rows),
            "index": rng.integers(0, 99, rows),
        }
        for name, value in {**own, "index": index}.items():
            crowd[name][at] = value
        seeds = rng.integers(2**63, size=rows, dtype=np.uint64)
        seeds[at], crowded = seed, logits.copy()
        crowded[at] = mine
        assert sample(crowded, seeds=seeds, **crowd)[at] == alone


def test_a_near_tie_that_swaps_ranks_keeps_its_draw():
    """Noise belongs to tokens: an ulp more on one logit changes few draws, if any."""
    logits = np.zeros(VOCAB, np.float32)
    raised = logits.copy()
    raised[9] = 1e-6
    a, b = (sample(x, seeds=range(ROWS)) for x in (logits, raised))
    assert (a != b).mean() <= 1e-3


# --- greedy rows and extremes --------------------------------------------------------------------


def test_greedy_takes_the_lowest_id_among_equals():
    logits = np.zeros((3, VOCAB), np.float32)
    logits[1, [4, 9]] = 2
    logits[2, 3] = -np.inf
    out = sampler.greedy(jnp.asarray(logits))
    assert out.dtype == jnp.int32 and out.tolist() == [0, 4, 0]


def test_rows_of_temperature_0_are_greedy_in_a_sampling_batch():
    rng = np.random.default_rng(0)
    logits = rng.integers(0, 4, (ROWS, VOCAB)).astype(np.float32)  # many ties
    temperature = rng.choice([0, 1], ROWS)
    drawn = sample(
        logits,
        seeds=range(ROWS),
        temperature=temperature,
        top_k=rng.choice([-1, 1, 4], ROWS),
        top_p=rng.choice([0.3, 1], ROWS),
    )
    greedy = logits.argmax(-1)
    assert np.array_equal(drawn[temperature == 0], greedy[temperature == 0])
    assert (drawn != greedy)[temperature == 1].mean() > 0.2


def test_top_k_1_is_greedy_where_the_best_is_alone():
    logits = np.stack([random_logits(seed) for seed in range(64)])
    drawn = sample(logits, seeds=range(64), temperature=5.0, top_k=1)
    assert np.array_equal(drawn, logits.argmax(-1))


TINY = [1e-6, 1e-30, 1.2e-38, 1e-42]  # the last is a denormal


@pytest.mark.parametrize("temperature", TINY)
def test_tiny_temperatures_act_like_greedy(temperature):
    logits = np.stack([random_logits(seed) * scale for seed in range(16) for scale in (1, 1e4)])
    logits[::5, 3] = -np.inf
    for top_p in (0.5, 1.0):
        drawn = sample(logits, seeds=range(32), temperature=temperature, top_p=top_p)
        assert np.array_equal(drawn, logits.argmax(-1))


@pytest.mark.parametrize("temperature", TINY[1:])
def test_tiny_temperatures_tell_neighbouring_floats_apart(temperature):
    """Logits an ulp apart are worlds apart at 1e-30."""
    logits = np.full(VOCAB, -3, np.float32)
    logits[7], logits[5] = 1, np.nextafter(np.float32(1), np.float32(2))
    assert set(sample(logits, seeds=range(ROWS), temperature=temperature)) == {5}


@pytest.mark.parametrize("temperature", [1e6, 1e30])
def test_huge_temperatures_are_even(temperature):
    drawn = sample(random_logits() * 5, seeds=range(ROWS), temperature=temperature)
    counts = np.bincount(drawn, minlength=VOCAB)
    assert chi_square(counts, np.full(VOCAB, 1 / VOCAB)) <= chi_square_limit(VOCAB - 1)


@pytest.mark.parametrize("temperature", [1e-6, 1.0, 1e6])
def test_tokens_of_minus_infinity_are_never_drawn(temperature):
    logits = np.full(VOCAB, -np.inf)
    logits[9] = 0
    drawn = sample(logits, seeds=range(ROWS), temperature=temperature)
    assert set(drawn) == {9}
    logits[[1, 3]] = 0
    drawn = sample(logits, seeds=range(ROWS), temperature=temperature, top_k=8)
    assert set(drawn) == {1, 3, 9}


@pytest.mark.parametrize("temperature", [1e-6, 0.7, 1e6])
def test_logits_of_any_size_draw_the_best(temperature):
    logits = np.array([-3e38, -1e38, 0, 1e30, 1e38, 3.4e38, 2e38, 1], np.float32)
    logits = np.tile(logits, 2)
    for top_p, best in [(1.0, {5, 13}), (0.9, {5, 13}), (0.4, {5})]:
        drawn = sample(logits, seeds=range(ROWS), temperature=temperature, top_p=top_p)
        assert set(drawn) == best


# --- log probabilities ---------------------------------------------------------------------------


def exact_logprob(logits, tokens) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    rows = np.arange(len(logits))
    return shifted[rows, tokens] - np.log(np.exp(shifted).sum(-1))


@pytest.mark.parametrize("offset", [0.0, 10.0, -30.0, 1000.0])
@pytest.mark.parametrize("vocab", [97, 4099])
def test_raw_logprob_is_the_log_softmax_of_the_raw_logits(offset, vocab):
    """Every f32 row has an exact answer: a common offset must not cost digits."""
    rng = np.random.default_rng(0)
    logits = (rng.normal(size=(200, vocab)) * 3 + offset).astype(np.float32)
    tokens = np.where(rng.random(200) < 0.5, logits.argmax(-1), rng.integers(0, vocab, 200))
    exact = exact_logprob(logits, tokens)
    got = np.asarray(raw_logprob(logits, tokens.astype(np.int32)))
    assert got.dtype == np.float32
    assert (np.abs(got - exact) - np.spacing(np.abs(got))).max() <= 1e-6


def test_raw_logprob_of_extreme_logits():
    inf = np.inf
    logits = np.array([[0, -inf, -inf], [0, 0, -inf], [3e38, -3e38, 0], [-5, -5, -5]], np.float32)
    for token in range(3):
        got = np.asarray(raw_logprob(logits, np.full(4, token, np.int32)))
        with np.errstate(over="ignore"):
            exact = exact_logprob(logits, token).astype(np.float32)
        np.testing.assert_allclose(got, exact, rtol=1e-6)
