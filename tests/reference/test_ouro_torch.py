"""The reference itself: hand-computed cases, and its two formulations against each other."""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.reference.ouro_torch import (  # noqa: E402
    History,
    IncrementalOracle,
    TorchOuro,
    attention,
    causal_attention,
    exit_step,
    random_ouro,
    rope,
    rotate,
    write_hf_folder,
)

pytestmark = pytest.mark.torch
torch.set_num_threads(1)

PROMPT = [5, 11, 42, 7, 90, 13]


@pytest.fixture(scope="module")
def model():
    return TorchOuro(*random_ouro())


@pytest.fixture(scope="module")
def model64():
    return TorchOuro(*random_ouro(), dtype=torch.float64)


def error(a, b):
    return float((a - b).abs().max() / b.abs().max())


def exit_depth(hazards, **rule):
    remaining = 1.0
    for depth, hazard in enumerate(hazards, start=1):
        remaining, exits, _ = exit_step(remaining, hazard, depth, **rule)
        if exits:
            return depth
    raise AssertionError("no exit")


# --- the exit rule -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hazards, min_loops, max_loops, threshold, expected",
    [
        ([0.3, 0.3, 0.3, 0.3], 2, 4, 0.5, 2),  # 1 - 0.7 * 0.7 = 0.51
        ([0.3, 0.3, 0.3, 0.3], 1, 4, 0.3, 1),
        ([0.3, 0.3, 0.3, 0.3], 3, 4, 0.5, 3),
        ([0.3, 0.3, 0.3, 0.3], 2, 4, 0.6, 3),  # 0.51 < 0.6 <= 0.657
        ([0.3, 0.3, 0.3, 0.3], 1, 4, 0.9, 4),  # 0.7599: never, the cap decides
        ([0.9, 0.0, 0.0, 0.0], 2, 4, 0.5, 2),  # hazards before min_loops count
        ([0.1, 0.1, 0.1, 0.1], 1, 3, 0.5, 3),
        ([0.0, 0.0, 0.0, 0.0], 1, 4, 0.0, 1),
        ([1.0, 1.0, 1.0, 1.0], 1, 4, 1.0, 4),  # threshold 1 is fixed depth, whatever the hazards
        ([1.0, 1.0, 1.0, 1.0], 1, 3, 1.0, 3),
    ],
)
def test_exit_depth(hazards, min_loops, max_loops, threshold, expected):
    rule = {"min_loops": min_loops, "max_loops": max_loops, "threshold": threshold}
    assert exit_depth(hazards, **rule) == expected


def test_exit_margin_only_where_compared():
    rule = {"min_loops": 2, "max_loops": 3, "threshold": 0.5}
    remaining, exits, margin = exit_step(1.0, 0.3, 1, **rule)
    assert remaining.dtype == np.float32 and not exits and margin == math.inf
    _, exits, margin = exit_step(remaining, 0.3, 2, **rule)
    assert exits and margin == pytest.approx(0.01, abs=1e-6)
    assert exit_step(remaining, 0.3, 3, **rule)[1:] == (True, math.inf)


# --- attention and the two layouts ---------------------------------------------------------------


@pytest.mark.parametrize(
    "layout, expected",
    [
        ("last_exited", 20.0),  # A as of loop 1: equal keys, (10 + 30) / 2
        ("shared", (math.e**2 * 20 + math.e * 30) / (math.e**2 + math.e)),  # A's last version
    ],
)
def test_two_tokens_two_loops(layout, expected):
    def scalar(x):
        return torch.tensor([[float(x)]])

    history = History(layout, depth=2, num_layers=1)
    history.write(1, 0, 0, scalar(1), scalar(10))
    history.write(2, 0, 0, scalar(2), scalar(20))
    history.write(1, 0, 1, scalar(1), scalar(30))
    out = attention(scalar(1), *history.read(1, 0))
    assert float(out) == pytest.approx(expected, abs=1e-4)
    if layout == "shared":
        assert expected == pytest.approx(22.6894, abs=1e-4)


def test_one_query_attention_equals_causal_attention_with_gqa():
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(7, n, 8, generator=rng, dtype=torch.float64) for n in (6, 2, 2))
    dense = causal_attention(q, k, v)
    for t in range(7):
        torch.testing.assert_close(attention(q[t], k[: t + 1], v[: t + 1]), dense[t])
    # Query heads 0-2 read kv head 0, heads 3-5 kv head 1.
    moved = causal_attention(q, k, torch.stack([v[:, 0], v[:, 1] + 1], dim=1))
    torch.testing.assert_close(moved[:, :3], dense[:, :3])
    torch.testing.assert_close(moved[:, 3:], dense[:, 3:] + 1)


def test_rope_rotates_split_halves():
    cos, sin = rope(torch.tensor([0, 3]), head_dim=4, theta=100.0)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).expand(2, 1, 4)
    a, b = 3 * 1.0, 3 * 0.1  # inverse frequencies 100 ** -(0, 2) / 4
    expected = [
        math.cos(a) - 3 * math.sin(a),
        2 * math.cos(b) - 4 * math.sin(b),
        3 * math.cos(a) + math.sin(a),
        4 * math.cos(b) + 2 * math.sin(b),
    ]
    torch.testing.assert_close(rotate(x, cos, sin)[0, 0], x[0, 0])
    torch.testing.assert_close(rotate(x, cos, sin)[1, 0], torch.tensor(expected))


def test_single_token_by_hand(model64):
    """With one position attention returns v and RoPE does nothing: two loops written out."""
    config, tensors = random_ouro()
    w = {name: x.astype(np.float64) for name, x in tensors.items()}

    def norm(x, name):
        return x / np.sqrt((x * x).mean() + config["rms_norm_eps"]) * w[f"{name}.weight"]

    h = w["model.embed_tokens.weight"][42]
    for result in model64.dense_forward([42], loops=2):
        for i in range(config["num_hidden_layers"]):
            p = f"model.layers.{i}."
            v = w[p + "self_attn.v_proj.weight"] @ norm(h, p + "input_layernorm")
            v = np.repeat(v.reshape(2, 16), 2, axis=0).ravel()  # 2 query heads per kv head
            v = w[p + "self_attn.o_proj.weight"] @ v
            h = h + norm(v, p + "input_layernorm_2")
            x = norm(h, p + "post_attention_layernorm")
            g = w[p + "mlp.gate_proj.weight"] @ x
            x = g / (1 + np.exp(-g)) * (w[p + "mlp.up_proj.weight"] @ x)
            x = w[p + "mlp.down_proj.weight"] @ x
            h = h + norm(x, p + "post_attention_layernorm_2")
        h = norm(h, "model.norm")
        gate = w["model.early_exit_gate.weight"][0] @ h + w["model.early_exit_gate.bias"][0]
        np.testing.assert_allclose(result.hidden[0], h, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(result.gate_logit[0], gate, rtol=1e-10)
        np.testing.assert_allclose(result.logits[0], w["lm_head.weight"] @ h, rtol=1e-9, atol=1e-9)


# --- the oracle against the dense forward --------------------------------------------------------


@pytest.mark.parametrize("overrides", [{}, {"num_key_value_heads": 4}, {"head_dim": 8}])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_fixed_depth_equals_dense_forward(overrides, dtype, bound):
    config, tensors = random_ouro(overrides)
    model = TorchOuro(config, tensors, dtype)
    out = IncrementalOracle(model).generate(PROMPT, max_tokens=24, keep_logits=True)
    assert out.exit_depths == [4] * 24 and set(out.exit_margins) == {math.inf}
    dense = model.dense_forward(PROMPT + out.token_ids[:-1])[-1]
    logits = dense.logits[len(PROMPT) - 1 :]
    assert error(out.logits, logits) <= bound
    assert error(out.hidden, dense.hidden[len(PROMPT) - 1 :]) <= bound
    assert out.token_ids == out.argmax_ids == logits.argmax(-1).tolist()
    top = logits.double().topk(2).values
    np.testing.assert_allclose(out.logit_gaps, top[:, 0] - top[:, 1], atol=1e-4)
    logprobs = torch.log_softmax(logits.double(), -1)[range(24), out.token_ids]
    np.testing.assert_allclose(out.logprobs, logprobs, atol=1e-4)


def test_adaptive_depth_equals_dense_with_versions(model64):
    """A query at depth d sees version min(d, e): the same, computed for all positions at once."""
    out = IncrementalOracle(model64).generate(
        PROMPT, max_tokens=40, exit_threshold=0.6, keep_logits=True
    )
    assert len(set(out.exit_depths)) >= 3
    tokens = PROMPT + out.token_ids[:-1]
    exits = torch.tensor([4] * (len(PROMPT) - 1) + out.exit_depths)
    hidden, final, remaining, frozen = model64.embed(tokens), None, torch.ones(len(tokens)), {}
    for depth in range(1, 5):
        fresh = (exits >= depth)[:, None, None]

        def attend(layer, q, k, v, depth=depth, fresh=fresh):
            if depth > 1:
                k, v = (torch.where(fresh, x, old) for x, old in zip((k, v), frozen[layer]))
            frozen[layer] = (k, v)
            return causal_attention(q, k, v)

        hidden = model64.loop(hidden, range(len(tokens)), attend)
        final = hidden if final is None else torch.where(fresh[:, 0], hidden, final)
        remaining = remaining * (1 - torch.sigmoid(model64.gate(hidden).float()))
        over = (1 - remaining >= 0.6)[len(PROMPT) :]
        decoded = exits[len(PROMPT) :]
        if 2 <= depth < 4:
            assert over[decoded == depth].all() and not over[decoded > depth].any()
    assert error(out.logits, model64.head(final)[len(PROMPT) - 1 :]) <= 1e-12


def test_shared_equals_dense_only_for_a_single_position(model64):
    dense = model64.dense_forward(PROMPT)[-1].logits
    shared = IncrementalOracle(model64, "shared")
    one = shared.generate(PROMPT[:1], max_tokens=1, keep_logits=True)
    assert error(one.logits[0], dense[0]) <= 1e-12
    two = shared.generate(PROMPT[:2], max_tokens=1, keep_logits=True)
    assert error(two.logits[0], dense[1]) > 1e-3


def test_shared_reads_final_versions(model64):
    """The second position by hand: it sees the first one's last K/V at every depth."""
    last = {}

    def first(layer, q, k, v):
        last[layer] = (k, v)  # later loops overwrite
        return causal_attention(q, k, v)

    def second(layer, q, k, v):
        history = (torch.cat([old, x]) for old, x in zip(last[layer], (k, v)))
        return attention(q[0], *history)[None]

    for position, (token, attend) in enumerate([(5, first), (11, second)]):
        hidden = model64.embed([token])
        for _ in range(4):
            hidden = model64.loop(hidden, [position], attend)
    out = IncrementalOracle(model64, "shared").generate([5, 11], max_tokens=1, keep_logits=True)
    assert error(out.logits, model64.head(hidden)) <= 1e-12


# --- histories, depths, ends ---------------------------------------------------------------------


@pytest.mark.parametrize("layout, planes", [("last_exited", 4), ("shared", 1)])
def test_last_token_is_never_fed_back(model, layout, planes):
    out = IncrementalOracle(model, layout).generate(PROMPT, max_tokens=10, exit_threshold=0.6)
    assert len(out.token_ids) == 10 and out.hidden.shape == (10, 64)
    assert out.logits is None
    assert len(out.history.planes) == planes
    assert {len(e) for plane in out.history.planes for e in plane} == {len(PROMPT) + 10 - 1}


def test_exit_fills_the_deeper_planes(model):
    out = IncrementalOracle(model).generate(PROMPT, max_tokens=60, exit_threshold=0.6)
    assert {2, 3, 4} <= set(out.exit_depths)
    # Output n + 1 is computed at the position where output n was fed.
    for position, depth in enumerate(out.exit_depths[1:], start=len(PROMPT)):
        for layer in range(model.num_layers):
            kv = [out.history.entries(d, layer)[position] for d in range(1, 5)]
            for x in (0, 1):
                for d in range(1, 4):
                    assert torch.equal(kv[d][x], kv[d - 1][x]) == (d >= depth)


@pytest.mark.parametrize("layout", ["last_exited", "shared"])
@pytest.mark.parametrize("threshold", [0.5, 0.6, 0.7])
def test_random_model_is_lively(model, layout, threshold):
    out = IncrementalOracle(model, layout).generate(
        PROMPT, max_tokens=100, exit_threshold=threshold
    )
    assert out.exit_depths[0] == 4 and {2, 3, 4} <= set(out.exit_depths)
    assert out.exit_margins[0] == math.inf and min(out.exit_margins) > 1e-5
    assert all(m < 1 for m in out.exit_margins[1:])
    assert len(set(out.token_ids)) >= 15 and min(out.logit_gaps) > 1e-4
    fixed = IncrementalOracle(model, layout).generate(PROMPT, max_tokens=100)
    assert fixed.token_ids != out.token_ids


def test_layouts_differ(model):
    a, b = (
        IncrementalOracle(model, layout).generate(PROMPT, max_tokens=20)
        for layout in ("last_exited", "shared")
    )
    assert a.token_ids != b.token_ids and error(a.hidden[0], b.hidden[0]) > 1e-3


def test_loop_bounds(model):
    oracle = IncrementalOracle(model)

    def depths(**kw):
        return oracle.generate(PROMPT, max_tokens=30, **kw).exit_depths

    assert depths(max_loops=3) == [4] + [3] * 29
    assert depths(max_loops=1) == [4] + [1] * 29
    assert depths(exit_threshold=0.0) == [4] + [2] * 29  # min_loops is 2 unless told
    assert 1 in depths(exit_threshold=0.4, min_loops=1)
    assert set(depths(exit_threshold=0.5, min_loops=3, max_loops=3)) == {3, 4}
    assert set(depths(exit_threshold=0.6, min_loops=3)) == {3, 4}


def test_total_ut_steps_is_the_depth(model):
    out = IncrementalOracle(model, total_ut_steps=2).generate(PROMPT, max_tokens=5)
    assert out.exit_depths == [2] * 5 and len(out.history.planes) == 2
    dense = model.dense_forward(PROMPT, loops=2)
    assert len(dense) == 2
    assert error(out.hidden[0], dense[-1].hidden[-1]) <= 1e-5


@pytest.mark.parametrize("layout", ["last_exited", "shared"])
def test_trace_replay(model, layout):
    oracle = IncrementalOracle(model, layout)
    free = oracle.generate(PROMPT, max_tokens=30, exit_threshold=0.6)
    trace = oracle.generate(PROMPT, max_tokens=30, depths=free.exit_depths)
    assert (trace.token_ids, trace.exit_depths) == (free.token_ids, free.exit_depths)
    assert torch.equal(trace.hidden, free.hidden)
    assert set(trace.exit_margins) == {math.inf}
    assert oracle.generate(PROMPT, max_tokens=4, depths=[4, 1, 3, 2]).exit_depths == [4, 1, 3, 2]


@pytest.mark.parametrize("depths", [[3, 4, 4], [4, 4], [4, 5, 4], [4, 0, 4]])
def test_bad_traces_are_refused(model, depths):
    with pytest.raises(ValueError, match="depths"):
        IncrementalOracle(model).generate(PROMPT, max_tokens=3, depths=depths)


def test_stop_ids_end_the_output_and_stay(model):
    oracle = IncrementalOracle(model)
    free = oracle.generate(PROMPT, max_tokens=20).token_ids
    stop = free[7]
    out = oracle.generate(PROMPT, max_tokens=20, stop_token_ids=[stop])
    assert out.token_ids == free[: free.index(stop) + 1]
    assert len(out.history.entries(1, 0)) == len(PROMPT) + len(out.token_ids) - 1


def test_forced_tokens(model):
    oracle = IncrementalOracle(model)
    free = oracle.generate(PROMPT, max_tokens=12, exit_threshold=0.6)
    forced = oracle.generate(PROMPT, max_tokens=12, exit_threshold=0.6, force_tokens=free.token_ids)
    assert forced.token_ids == forced.argmax_ids == free.token_ids
    assert torch.equal(forced.hidden, free.hidden)
    # Another token than the argmax goes on being decoded, and greedy decoding resumes after it.
    other = (free.token_ids[0] + 1) % 97
    forced = oracle.generate(PROMPT, max_tokens=12, force_tokens=[other])
    assert forced.token_ids[0] == other and forced.argmax_ids[0] == free.token_ids[0]
    assert forced.logprobs[0] < free.logprobs[0]
    resumed = oracle.generate([*PROMPT, other], max_tokens=11)
    assert forced.token_ids[1:] == resumed.token_ids


# --- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
def test_folder_round_trip(tmp_path, shards):
    config, tensors = random_ouro(seed=3)
    model = TorchOuro.from_folder(write_hf_folder(tmp_path / "m", config, tensors, shards))
    assert len(list((tmp_path / "m").glob("*.safetensors"))) == shards
    assert (tmp_path / "m" / "model.safetensors.index.json").exists() == (shards > 1)
    assert model.weights.keys() == tensors.keys()
    assert all(np.array_equal(model.weights[name].numpy(), x) for name, x in tensors.items())


def test_config_defaults_and_numpy_tensors(model):
    config, tensors = random_ouro()
    config = {k: v for k, v in config.items() if k not in ("head_dim", "rope_theta")}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    same = TorchOuro(config, {name: torch.from_numpy(x) for name, x in tensors.items()})
    assert torch.equal(
        same.dense_forward(PROMPT)[-1].logits, model.dense_forward(PROMPT)[-1].logits
    )
    config, tensors = random_ouro({"num_key_value_heads": None})
    assert tensors["model.layers.0.self_attn.k_proj.weight"].shape == (64, 64)
    with pytest.raises(ValueError, match="k_proj"):
        TorchOuro({**config, "num_key_value_heads": 2}, tensors)


def test_random_ouro_is_reproducible():
    (_, a), (_, b), (_, c) = random_ouro(seed=1), random_ouro(seed=1), random_ouro(seed=2)
    name = "model.layers.2.mlp.down_proj.weight"
    assert np.array_equal(a[name], b[name]) and not np.array_equal(a[name], c[name])
