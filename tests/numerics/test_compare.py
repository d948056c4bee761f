"""Traces against each other: what is found, what is not, and what is refused."""

import functools
import json

import jax
import numpy as np
import pytest

import glm5_jax as glm
from glm5_jax.checkpoint.tiny import packaged_config
from glm5_jax.numerics.compare import compare
from glm5_jax.numerics.sites import sites_of
from glm5_jax.numerics.trace import Trace


def config_of(**changes):
    raw = json.loads(packaged_config("tiny").read_text())
    raw["text_config"] |= {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "deepseek_sparse_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "indexer_types": ["full"] * 3,
        "num_nextn_predict_layers": 0,
        "n_group": 4,
        "topk_group": 3,
    }
    raw["text_config"] |= changes
    del raw["text_config"]["first_k_dense_replace"]
    return raw


def batch(seed):
    """Two rows of tokens, one of them padded on the left."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 200, (2, 45)).astype(np.int32)
    mask = np.ones(tokens.shape, bool)
    mask[1, : rng.integers(1, 9)] = False
    return tokens, mask


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return glm.make_tiny(tmp_path_factory.mktemp("compare") / "ckpt", config_of())


@pytest.fixture(scope="module")
def traced(checkpoint):
    """`traced(dtype, reduce)`: one model on one batch."""

    @functools.cache
    def trace(dtype="float32", reduce="full"):
        return glm.trace(glm.load(checkpoint, dtype=dtype), *batch(0), reduce=reduce)

    return trace


@pytest.fixture(scope="module")
def full(traced):
    return traced()


def changed(trace, **arrays):
    """The trace with other arrays, by site; `__` stands for a dot."""
    found = {name: np.array(array) for name, array in trace.items()}
    found |= {name.replace("__", "."): array for name, array in arrays.items()}
    return Trace(found, trace.tokens, trace.mask, trace.meta)


def test_a_trace_equals_itself(full):
    table = compare(full, full)
    assert table.ok and table.first_divergence is None and not table.flips
    assert [row.name for row in table.rows] == list(sites_of(full.skeleton))
    assert {row.verdict for row in table.rows} == {"equal"}
    assert table.logits.max_kl == 0 and table.logits.top1 == 1
    assert (table.only_in_trace, table.only_in_other) == ((), ())
    assert "equal to the bit at all" in str(table)
    assert "Both ran the same model." in table.to_html()


@pytest.mark.parametrize(("reduce", "seeds"), [("full", range(20)), ("stats", range(100, 104))])
def test_rounding_is_no_divergence_on_any_model(tmp_path, reduce, seeds):
    """Plain bfloat16 against float32, fresh weights and tokens each time."""
    flips = 0
    for seed in seeds:
        path = glm.make_tiny(tmp_path / str(seed), config_of(), seed=seed)
        sides = [
            glm.trace(glm.load(path, dtype=dtype), *batch(seed), reduce=reduce)
            for dtype in ("bfloat16", "float32")
        ]
        table = compare(*sides)
        assert table.ok and not table.moved, f"seed {seed}: {table}"
        assert all(flip.explained for flip in table.flips)
        assert max(row.relative_l2 for row in table.rows if not row.flips) > 1e-3
        flips += len(table.flips)
    assert (flips > 20) == (reduce == "full")  # there are flips to be told from mistakes


def test_an_error_is_found_where_it_arises_and_followed(traced, full):
    rng = np.random.default_rng(0)
    sites = sites_of(full.skeleton)
    low = traced("bfloat16")
    for name in rng.permutation([n for n, site in sites.items() if not site.choice])[:12]:
        wrong = np.array(full[name])
        scores = sites[name].axes in ("B T NP", "B T E")
        wrong = np.where(np.isfinite(wrong) & (wrong != 0), wrong * 1.5 + (0 if scores else 0.5), 0)
        for side in (full, low):  # in bfloat16 too, where more is explained
            table = compare(changed(full, **{name: wrong.astype(np.float32)}), side)
            assert table.first_divergence.name == name
            assert table.first_divergence.excess > 1


def test_what_rounding_explains_is_by_the_coarser_dtype(traced, full):
    """1e-5 is far beyond float32, and nothing beside bfloat16."""
    name = "layers.1.attn.latent"
    wrong = changed(full, **{name: np.array(full[name]) * np.float32(1 + 1e-5)})
    assert compare(wrong, full).first_divergence.name == name
    assert compare(wrong, traced("bfloat16")).ok


def test_one_wrong_token_is_enough(full):
    name = "layers.2.attn.beta"
    wrong = np.array(full[name])
    wrong[0, 17] *= 1.01
    table = compare(changed(full, **{name: wrong}), full)
    assert table.first_divergence.name == name
    assert table.first_divergence.worst[:2] == (0, 17)


def test_nan_is_named(full):
    wrong = np.array(full["layers.0.attn.o"])
    wrong[0, 5, 2, 3] = np.nan
    table = compare(full, changed(full, layers__0__attn__o=wrong))
    row = table.first_divergence
    assert (row.name, row.verdict, row.worst) == ("layers.0.attn.o", "not a number", (0, 5, 2, 3))
    assert np.isnan(row.cosine)
    assert "a number against NaN at [0, 5, 2, 3]" in str(table)
    assert json.loads(table.to_json())["first_divergence"] == "layers.0.attn.o"


def test_padding_is_not_compared(full):
    wrong = np.array(full["layers.1.attn.norm"])
    wrong[1, 0] = np.nan
    assert not full.mask[1, 0]
    assert compare(full, changed(full, layers__1__attn__norm=wrong)).ok


def test_experts_in_another_order_are_the_same(full):
    at = "layers.1.ffn.router"
    table = compare(
        full,
        changed(
            full,
            **{
                f"{at}.experts": np.array(full[f"{at}.experts"])[..., ::-1].copy(),
                f"{at}.weights": np.array(full[f"{at}.weights"])[..., ::-1].copy(),
            },
        ),
    )
    assert table.ok and not table.flips


def test_a_choice_without_a_reason_is_a_divergence(full):
    name = "layers.2.ffn.router.experts"
    wrong = np.array(full[name])
    scores = np.array(full["layers.2.ffn.router.scores"])[0, 9]
    wrong[0, 9, 0] = np.argmin(np.where(np.isfinite(scores), scores, np.inf))
    table = compare(full, changed(full, **{name: wrong}))
    assert table.first_divergence.name == name
    (flip,) = table.flips
    assert (flip.row, flip.position, flip.explained) == (0, 9, False)
    assert flip.gap > flip.allowed
    assert "The choices part" in str(table)


def test_a_flip_by_rounding_explains_what_is_behind_it_and_nothing_else(full):
    """Two scores change places by a rounding; whatever that token reads from there on differs."""
    at = "layers.1.ffn.router"
    scores, experts = (np.array(full[f"{at}.{n}"]) for n in ("scores", "experts"))
    t = 20
    order = np.argsort(-scores[0, t])
    last, refused = order[experts.shape[-1] - 1], order[experts.shape[-1]]
    scores[0, t, refused] = scores[0, t, last] * np.float32(1 - 1e-7)
    right = {f"{at}.scores": scores}
    flipped = scores.copy()
    flipped[0, t, refused] = scores[0, t, last] * np.float32(1 + 1e-7)
    chosen = np.where(experts == last, refused, experts)
    chosen[0, :t], chosen[0, t + 1 :], chosen[1] = experts[0, :t], experts[0, t + 1 :], experts[1]
    moved = {f"{at}.scores": flipped, f"{at}.experts": chosen.astype(np.int32)}
    sites = sites_of(full.skeleton)
    names = list(full)
    mixed = names.index("layers.2.attn.state")
    for i, name in enumerate(names):
        if i < names.index("layers.1.ffn.experts") or "router" in name or "shared" in name:
            continue
        # Up to the next recurrence it is that token alone, then all that come after it.
        behind = slice(t, t + 1) if i < mixed else slice(t, None)
        moved[name] = np.array(full[name])
        moved[name][0, behind if sites[name].axes.startswith("B T") else ...] *= 1.7
    table = compare(changed(full, **right), changed(full, **moved))
    assert table.ok, str(table)
    (flip,) = table.flips
    assert flip.explained and flip.gap < 1e-6
    behind = {row.name: row.behind_flips for row in table.rows}
    real = full.mask.sum()
    assert behind["layers.1.ffn.moe"] == pytest.approx(1 / real)
    assert behind["layers.2.attn.o"] == pytest.approx((45 - t) / real)

    # The same errors one token earlier are no flip's work.
    earlier = np.array(moved["layers.1.ffn.moe"])
    earlier[0, t - 1] *= 1.7
    table = compare(changed(full, **right), changed(full, **moved | {"layers.1.ffn.moe": earlier}))
    assert table.first_divergence.name == "layers.1.ffn.moe"


def test_a_selection_that_its_pools_do_not_explain(full):
    name = "layers.1.attn.selection"
    wrong = np.array(full[name])
    wrong[..., -3:] = -1  # no tail
    table = compare(full, changed(full, **{name: wrong}))
    assert table.first_divergence.name == name
    assert all(flip.explained is False for flip in table.flips)
    without_pools = {n: full[n] for n in full if not n.endswith(".pools")}
    table = compare(
        Trace(without_pools, full.tokens, full.mask, full.meta), changed(full, **{name: wrong})
    )
    assert table.first_divergence.name == name
    assert table.only_in_other == ("layers.1.attn.pools",)


def test_stats_find_the_site_too(traced, full):
    stats = traced(reduce="stats")
    assert compare(stats, full).ok and compare(full, stats).ok
    wrong = changed(full, layers__1__attn__dsa=np.array(full["layers.1.attn.dsa"]) * 1.5)
    for table in (compare(stats, wrong), compare(wrong, stats)):
        assert table.first_divergence.name == "layers.1.attn.dsa"
        assert not any(
            row.tail in ("attn.pools", "attn.selection", "ffn.router.experts") for row in table.rows
        )


def test_stats_need_a_trace_on_the_other_side(traced, full):
    with pytest.raises(glm.TraceError, match="stats alone"):
        compare(traced(reduce="stats"), {"embedding": np.array(full["embedding"])})


def test_few_sites_are_enough(traced, full):
    """The error of sites that are missing in between is allowed for."""
    names = [name for name in full if name.endswith("ffn.expand") or name == "final.head"]
    outputs = Trace({name: full[name] for name in names}, full.tokens, full.mask, full.meta)
    table = compare(outputs, full)
    assert table.ok and len(table.rows) == 4
    assert "layers.0.attn.kda" in table.only_in_other
    assert compare(outputs, traced("bfloat16")).ok
    wrong = changed(outputs, layers__1__ffn__expand=np.array(outputs["layers.1.ffn.expand"]) * 2)
    assert compare(wrong, full).first_divergence.name == "layers.1.ffn.expand"


def test_plain_arrays_will_do(full):
    sites = {name: np.array(array) for name, array in full.items()}
    assert compare(sites, sites | {"tokens": full.tokens, "mask": full.mask}).ok
    sites["layers.0.ffn.dense"] = sites["layers.0.ffn.dense"] * 2
    assert compare(sites, full).first_divergence.name == "layers.0.ffn.dense"
    named = {"layers.0.attn.norm": np.ones((1, 4, 3)), "layers.0.mine": np.ones((1, 4, 3))}
    assert compare(named, named | {"layers.0.mine": np.zeros((1, 4, 3))}).first_divergence.name


def test_files_will_do(full, tmp_path):
    path = full.save(tmp_path / "a.safetensors")
    assert compare(path, str(path)).sides[0]["label"] == str(path)


def test_our_own_model_measures_the_gains(checkpoint, full, traced):
    x64 = jax.config.read("jax_enable_x64")
    low = traced("bfloat16")
    for model in (checkpoint, glm.load(checkpoint)):
        table = compare(low, full, model=model)
        assert table.ok, str(table)
    assert jax.config.read("jax_enable_x64") == x64
    given = compare(low, full, expected=(full, traced("float64")))
    assert str(given.rows) == str(table.rows)
    assert any(
        one.expected != two.expected
        for one, two in zip(given.rows, compare(low, full).rows, strict=True)
        if not np.isnan(one.expected)
    )
    wrong = changed(full, layers__2__ffn__shared=np.array(full["layers.2.ffn.shared"]) * 1.3)
    assert compare(wrong, low, model=checkpoint).first_divergence.name == "layers.2.ffn.shared"


def other_config(trace):
    raw = json.loads(trace.meta["config"])
    text = raw.get("text_config", raw)
    text["rms_norm_eps"] = 1e-6
    from glm5_jax.numerics.trace import config_sha256

    config = json.dumps(raw)
    meta = trace.meta | {"config": config, "config_sha256": config_sha256(config)}
    return Trace(dict(trace), trace.tokens, trace.mask, meta)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            lambda t: Trace(dict(t), t.tokens + 1, t.mask, t.meta),
            r"different tokens: .* at \[0, 0\]",
        ),
        (lambda t: Trace(dict(t), t.tokens, ~t.mask, t.meta), "different masks"),
        (other_config, "different configs: rms_norm_eps is 1e-05 and 1e-06"),
        (lambda t: {"layers.0.unheard": np.ones((2, 45))}, "no site in common: .*unheard"),
        (lambda t: {"embedding": np.ones((2, 45, 7))}, r"embedding: shape \[2, 45, 48\] in .*7\]"),
        (lambda t: {"embedding": np.ones((2, 45, 48)), "tokens": np.ones((2, 3))}, "tokens: shape"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_line(full, other, message):
    with pytest.raises(glm.TraceError, match=message) as error:
        compare(full, other(full))
    assert "\n" not in str(error.value)


def test_arrays_that_are_not_of_the_tokens(full):
    wrong = {"embedding": np.ones((2, 44, 48)), "tokens": full.tokens}
    with pytest.raises(glm.TraceError, match=r"embedding: expected \[2, 45, ...\]"):
        compare(wrong, wrong)
    with pytest.raises(glm.TraceError, match="on which tokens"):
        compare({"embedding": wrong["embedding"]}, {"embedding": wrong["embedding"]}, model="x")
