"""The judge itself: that the float64 oracle is float64 throughout, and its sites what they say."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from glm5_jax.numerics import oracle
from glm5_jax.numerics.choices import discrete_gaps
from glm5_jax.numerics.oracle import (
    OracleMissing,
    build_oracle,
    oracle_layer,
    oracle_logits,
    oracle_model,
    oracle_module,
    oracle_sites,
    write_gradients,
)
from glm5_jax.numerics.random_models import randomize, write_checkpoint

torch = pytest.importorskip("torch", reason="the oracle extra is not installed")
pytest.importorskip("transformers.models.glm5_next", reason="the oracle extra is not installed")

GOLDEN = Path(__file__).parents[1] / "golden" / "parity"

# One model with every kind of part: KDA, full and shared DSA, dense and routed MLP, groups, tail.
EVERY_PART = {
    "num_hidden_layers": 4,
    "layer_types": [
        "linear_attention",
        "deepseek_sparse_attention",
        "full_attention",
        "linear_attention",
    ],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "indexer_types": ["full", "full", "shared", "full"],
    "index_kpool": 2,
    "index_topk": 6,
    "index_kpool_always_select_tail": True,
    "n_group": 2,
    "topk_group": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "swiglu_limit": 1.0,
    "hc_sinkhorn_iters": 3,
    "hc_mult": 3,
}


@pytest.fixture(scope="module")
def case(random_case):
    return random_case(11, **EVERY_PART)


@pytest.fixture(scope="module")
def exact(case):
    return oracle_model(case.directory, "float64")


@pytest.fixture(scope="module")
def batch(case):
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, case.config["text_config"]["vocab_size"], (2, 70))
    mask = np.ones_like(tokens)
    mask[1, :13] = 0
    return tokens, mask


@pytest.fixture(scope="module")
def sites(exact, batch):
    return oracle_sites(exact, *batch)


class NoNarrowFloats(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple) else (out,):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                assert value.dtype == torch.float64, f"{func} gave {value.dtype}"
        return out


def test_no_operation_of_the_float64_oracle_gives_less_than_float64(exact, batch):
    for name, tensor in (*exact.named_parameters(), *exact.named_buffers()):
        assert tensor.dtype == torch.float64, name
    with NoNarrowFloats():
        oracle_logits(exact, *batch)


def test_that_check_sees_the_float32_islands_of_the_released_module(case, batch):
    model = oracle_model(case.directory, "float32").double()
    with NoNarrowFloats(), pytest.raises(AssertionError, match=r"float32"):
        oracle_logits(model, *batch)


def test_both_modules_live_side_by_side():
    released, widened = oracle_module("float32"), oracle_module("float64")
    assert released is not widened
    assert released.Glm5NextConfig is widened.Glm5NextConfig
    assert oracle_module("float64") is widened


def test_hyper_connection_is_exact_to_float64_rounding(exact, case, sites):
    text = case.config["text_config"]
    hc = exact.model.language_model.layers[1].attn_hc
    fn, base, scale = (p.detach().numpy() for p in (hc.fn, hc.base, hc.scale))
    streams = sites["layers.1.in"]
    m, eps = text["hc_mult"], text["hc_eps"]
    flat = streams.reshape(*streams.shape[:2], -1)
    flat = flat / np.sqrt((flat**2).mean(-1, keepdims=True) + text["rms_norm_eps"])
    logits = flat @ fn.T * np.repeat(scale, [m, m, m * m]) + base
    pre = 1 / (1 + np.exp(-logits[..., :m])) + eps
    comb = logits[..., 2 * m :].reshape(*logits.shape[:2], m, m)
    comb = np.exp(comb) / np.exp(comb).sum(-1, keepdims=True) + eps
    comb = comb / (comb.sum(-2, keepdims=True) + eps)
    for _ in range(text["hc_sinkhorn_iters"] - 1):
        comb = comb / (comb.sum(-1, keepdims=True) + eps)
        comb = comb / (comb.sum(-2, keepdims=True) + eps)
    np.testing.assert_allclose(sites["layers.1.attn.comb"], comb, rtol=1e-14)
    collapsed = np.einsum("btm,btmx->btx", pre, streams)
    np.testing.assert_allclose(sites["layers.1.attn.collapse"], collapsed, atol=1e-14)
    weight = exact.model.language_model.layers[1].input_layernorm.weight.detach().numpy()
    scaled = collapsed / np.sqrt((collapsed**2).mean(-1, keepdims=True) + text["rms_norm_eps"])
    np.testing.assert_allclose(sites["layers.1.attn.norm"], scaled * weight, atol=3e-14)


def test_sites_join_up(sites, exact, batch, case):
    layers = case.config["text_config"]["num_hidden_layers"]
    for i in range(layers):
        for site in ("attn", "ffn"):
            before = sites[f"layers.{i}.in" if site == "attn" else f"layers.{i}.attn.expand"]
            kind = next(
                k for k in ("kda", "dsa", "dense", "moe") if f"layers.{i}.{site}.{k}" in sites
            )
            post, comb = sites[f"layers.{i}.{site}.post"], sites[f"layers.{i}.{site}.comb"]
            mixed = np.einsum("btij,btix->btjx", comb, before)
            added = post[..., None] * sites[f"layers.{i}.{site}.{kind}"][:, :, None]
            after = sites[f"layers.{i}.{site}.expand"]
            np.testing.assert_allclose(after, mixed + added, atol=1e-13)
        if i + 1 < layers:
            np.testing.assert_array_equal(after, sites[f"layers.{i + 1}.in"])
    np.testing.assert_allclose(after.mean(2), sites["final.mean"], atol=1e-14)
    np.testing.assert_array_equal(sites["final.head"], oracle_logits(exact, *batch))


def test_recorded_scores_give_the_recorded_choice(sites, case):
    pool, topk = (case.config["text_config"][k] for k in ("index_kpool", "index_topk"))
    scores = sites["layers.1.attn.selection.scores"][0]
    chosen = sites["layers.1.attn.selection"][0]
    assert int(sites["layers.1.attn.selection.k"]) == topk // pool
    for t, row in enumerate(scores):
        candidates = np.flatnonzero(row > np.finfo(row.dtype).min)
        best = candidates[np.argsort(-row[candidates])][: topk // pool]
        expected = {pool * p + slot for p in best for slot in range(pool)}
        if (t + 1) % pool:
            expected |= {t}
        assert {i for i in chosen[t].tolist() if i >= 0} == expected
    biased, indices = (sites[f"layers.2.ffn.router.{k}"] for k in ("experts.scores", "experts"))
    best = np.argsort(-biased, axis=-1)[..., : indices.shape[-1]]
    np.testing.assert_array_equal(np.sort(best), np.sort(indices))
    assert {"layers.1.attn.selection", "layers.2.ffn.router.groups"} <= set(discrete_gaps(sites))


def test_layer_alone_repeats_its_part_of_the_whole(exact, sites, batch):
    for i in range(4):
        previous = sites["layers.1.attn.selection"] if i == 2 else None
        alone = oracle_layer(exact, i, sites[f"layers.{i}.in"], batch[1], previous)
        assert alone.keys() == {name for name in sites if name.startswith(f"layers.{i}.")}
        for name, value in alone.items():
            np.testing.assert_array_equal(value, sites[name], err_msg=name)


def test_float32_oracle_is_near_the_float64_one_and_not_equal(case, exact, batch):
    truth = oracle_logits(exact, *batch)
    error = np.abs(oracle_logits(oracle_model(case.directory), *batch) - truth)[batch[1] == 1]
    assert 0 < error.max() < 1e-4 * np.abs(truth).max()


def test_left_padding_changes_nothing_for_real_tokens(exact, batch):
    tokens, mask = batch
    padded = oracle_logits(exact, tokens, mask)[1, 13:]
    alone = oracle_logits(exact, tokens[1:, 13:])[0]
    np.testing.assert_allclose(padded, alone, atol=1e-12)


def test_every_parameter_changes_the_logits(exact, batch):
    truth = oracle_logits(exact, *batch)[batch[1] == 1]
    scale = np.abs(truth).max()
    state = exact.state_dict(keep_vars=True)
    idle = []
    for name, tensor in state.items():
        if name.startswith("model.visual."):
            continue
        before = tensor.detach().clone()
        with torch.no_grad():
            tensor.copy_(before.flip(0) if before.ndim else -before)
        change = np.abs(oracle_logits(exact, *batch)[batch[1] == 1] - truth).max()
        with torch.no_grad():
            tensor.copy_(before)
        if not change > 1e-3 * scale:
            idle.append((name, change))
    assert not idle


def test_random_model_is_neither_tame_nor_wild(random_case):
    for seed in range(5):
        case = random_case(seed)
        sites = oracle_sites(oracle_model(case.directory, "float64"), case.tokens, case.mask)
        logits = sites["final.head"][case.real]
        assert 1.0 < logits.std() < 5.0
        streams = [v[case.real].std() for k, v in sites.items() if k.endswith("ffn.expand")]
        assert 0.1 < min(streams) <= max(streams) < 30


@pytest.mark.parametrize("naming", ["saved", "native"])
def test_bfloat16_checkpoint_holds_the_same_weights(case, exact, batch, naming, tmp_path):
    model = oracle_model(case.directory)
    write_checkpoint(model, tmp_path, naming=naming, dtype="bfloat16", max_shard_size="16KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 3
    float32 = set()
    for name, file in index.items():
        with safe_open(tmp_path / file, "pt") as shard:
            if shard.get_slice(name).get_dtype() == "F32":
                float32.add(name.split(".", 4)[-1])
    renamed = "attn_hc.base" if naming == "native" else "hc_attn_base"
    assert renamed in float32
    assert "mlp.gate.weight" in float32
    assert "input_layernorm.weight" not in float32
    again = oracle_model(tmp_path, "float64")
    np.testing.assert_array_equal(oracle_logits(again, *batch), oracle_logits(exact, *batch))


def test_gradients_agree_with_finite_differences(exact, case, batch, tmp_path):
    tokens, mask = batch
    loss = write_gradients(exact, tokens, tmp_path, mask)
    names = {
        "model.language_model.layers.3.self_attn.dt_bias": "forget_gate.dt_bias",
        "model.language_model.layers.1.hc_ffn_scale": "ffn_hc.scale",
        "model.language_model.layers.2.self_attn.kv_a_layernorm.weight": "kv_a_layernorm.weight",
    }
    state = exact.state_dict(keep_vars=True)
    with safe_open(tmp_path / "model.safetensors", "np") as stored:
        for saved, ending in names.items():
            layer = saved.split(".")[3]
            (name,) = (n for n in state if f"layers.{layer}." in n and n.endswith(ending))
            gradient = stored.get_tensor(saved)
            before = state[name].detach().clone()
            losses = []
            for step in (1e-5, -1e-5):
                with torch.no_grad():
                    state[name][0] += step
                losses.append(write_gradients(exact, tokens, tmp_path / "other", mask))
                with torch.no_grad():
                    state[name].copy_(before)
            slope = (losses[0] - losses[1]) / 2e-5
            assert slope == pytest.approx(float(gradient[0]), rel=1e-4, abs=1e-8)
        indexer = "model.language_model.layers.1.self_attn.indexer.wk.weight"
        assert not stored.get_tensor(indexer).any()
    assert 1 < loss < 12


def test_committed_golden_vectors_are_what_the_oracle_says():
    names = sorted(path for path in GOLDEN.iterdir() if path.is_dir())
    assert len(names) == 3
    for path in names:
        expected = load_file(path.with_suffix(".safetensors"))
        logits = oracle_logits(oracle_model(path, "float64"), expected["tokens"], expected["mask"])[
            expected["mask"] == 1
        ]
        np.testing.assert_allclose(logits, expected["logits"], atol=1e-12)


def test_oracle_refuses_to_judge_with_invented_weights(case, tmp_path):
    model = oracle_model(case.directory)
    state = model.state_dict()
    del state["model.language_model.layers.3.self_attn.forget_gate.A_log"]
    with oracle.quiet():
        model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ValueError, match=r"missing_keys.*A_log"):
        oracle_model(tmp_path)


def test_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OracleMissing, match=r"glm5-jax\[oracle\]") as error:
        build_oracle({})
    assert "\n" not in str(error.value)


def test_unknown_dtype_is_named():
    with pytest.raises(ValueError, match="float16"):
        oracle_module("float16")


def test_randomize_leaves_nothing_at_its_initial_value(case):
    fresh = build_oracle(case.config)
    before = {name: tensor.clone() for name, tensor in fresh.state_dict().items()}
    randomize(fresh, 0)
    for name, tensor in fresh.state_dict().items():
        assert (tensor != before[name]).float().mean() > 0.9, name
