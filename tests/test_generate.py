"""Generation: the same tokens as whole forward passes, whatever is drafted, padded or batched."""

import jax
import numpy as np
import pytest

import glm5_jax as glm
from glm5_jax import generation
from glm5_jax.checkpoint.tiny import make_tiny
from glm5_jax.generation import generate

# A KDA layer and a DSA layer that selects two pools of four, so that both have a past to forget.
# So few tokens that a draft is accepted now and then by chance.
CONFIG = {
    "model_type": "glm5_next_text",
    "vocab_size": 13,
    "hidden_size": 16,
    "intermediate_size": 12,
    "moe_intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 10,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 0,
    "v_head_dim": 5,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "index_n_heads": 12,
    "index_head_dim": 5,
    "index_topk": 8,
    "index_kpool": 4,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
    "layer_types": ["linear_attention", "deepseek_sparse_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "indexer_types": ["full", "full"],
    "linear_attn_config": {"num_heads": 2, "head_dim": 6, "short_conv_kernel_size": 4},
    "num_nextn_predict_layers": 1,
    "pad_token_id": 12,
    "eos_token_id": [],
}
NEW = 14
LENGTHS = (5, 19, 1, 12)
HOT = {"temperature": 3.0, "seed": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = make_tiny(tmp_path_factory.mktemp("generate") / "tiny", CONFIG, dtype="float32", seed=3)
    return glm.load(path, dtype="float64", mtp=True)


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(13, size=n).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def whole(model):
    """The logits [vocab] after some tokens, from a forward pass over all of them, uncached."""
    forward = jax.jit(lambda m, tokens, mask: m(tokens, mask))

    def logits(tokens):
        padded = np.zeros((1, max(LENGTHS) + NEW), np.int32)
        padded[0, : len(tokens)] = tokens
        mask = np.arange(padded.shape[1])[None] < len(tokens)
        return np.asarray(forward(model, padded, mask))[0, len(tokens) - 1]

    return logits


@pytest.fixture(scope="module")
def greedy(model, prompts):
    return generate(model, prompts, max_new_tokens=NEW)


@pytest.fixture(scope="module")
def hot(model, prompts):
    return generate(model, prompts, max_new_tokens=NEW, **HOT)


def test_greedy_tokens_are_those_of_whole_forward_passes(greedy, prompts, whole):
    assert greedy.tokens.shape == (4, NEW) and (greedy.lengths == NEW).all()
    assert len(set(greedy.tokens.ravel().tolist())) > 4  # it says more than one thing
    for prompt, row in zip(prompts, greedy.rows, strict=True):
        for n, token in enumerate(row):
            assert token == np.argmax(whole(prompt + row[:n]))


@pytest.mark.parametrize("settings", [{}, HOT], ids=["greedy", "hot"])
def test_a_row_alone_is_the_row_in_a_batch(model, prompts, greedy, hot, settings):
    alone = generate(model, prompts[:1], max_new_tokens=NEW, **settings)
    assert alone.rows == (hot if settings else greedy).rows[:1]


def test_padding_on_either_side_is_no_matter(model, prompts, greedy):
    tokens = np.full((4, 23), 7)
    mask = np.zeros((4, 23))
    for i, (start, prompt) in enumerate(zip((18, 0, 6, 3), prompts, strict=True)):
        tokens[i, start : start + len(prompt)] = prompt
        mask[i, start : start + len(prompt)] = 1
    assert generate(model, tokens, mask, max_new_tokens=NEW).rows == greedy.rows


def test_a_long_prompt_in_chunks_is_one_prompt(model, prompts, greedy, monkeypatch):
    monkeypatch.setattr(generation, "PREFILL_CHUNK", 4)  # the rest is padded to 16
    assert generation._chunk_widths(21) == [4] * 5 + [16]
    for drafts in (0, 2):
        found = generate(model, prompts, max_new_tokens=NEW, draft_tokens=drafts)
        assert found.rows == greedy.rows


@pytest.mark.parametrize("drafts", [1, 3])
@pytest.mark.parametrize(
    "settings", [{}, HOT, {"temperature": 1e6}], ids=["greedy", "hot", "noise"]
)
def test_drafts_change_no_token(model, prompts, greedy, hot, drafts, settings):
    plain = generate(model, prompts, max_new_tokens=NEW, **settings)
    drafted = generate(model, prompts, max_new_tokens=NEW, draft_tokens=drafts, **settings)
    np.testing.assert_array_equal(drafted.tokens, plain.tokens)
    stats = drafted.stats
    assert len(stats.drafted) == len(stats.accepted) == drafts
    assert stats.drafted[0] >= stats.accepted[0] >= stats.accepted[-1]
    # Each check of a row brings one token, and one for each draft that holds.
    checks, extra = stats.drafted[0], sum(stats.accepted)
    assert 4 * (NEW - 1) <= checks + extra < 4 * (NEW - 1 + drafts + 1)
    if "temperature" in settings and settings["temperature"] > 1e5:
        # Noise decides, and the head is drawn for with the same noise.
        assert stats.accepted == stats.drafted and stats.trunk_calls == -(
            -(NEW - 1) // (drafts + 1)
        )
    assert plain.stats.trunk_calls == NEW - 1 and plain.stats.drafted == ()


def test_a_draw_hangs_on_seed_and_place_alone(model, prompts, hot):
    other = [prompts[0], [1, 2], [3], [4]]
    assert generate(model, other, max_new_tokens=NEW, **HOT).rows[0] == hot.rows[0]
    again = generate(model, prompts, max_new_tokens=NEW, temperature=3.0, seed=5)
    assert again.rows != hot.rows
    # What was generated may as well have been in the prompt.
    longer = [prompt + row[:6] for prompt, row in zip(prompts, hot.rows, strict=True)]
    rest = generate(model, longer, max_new_tokens=NEW - 6, **HOT)
    assert rest.rows == [row[6:] for row in hot.rows]


def ended(rows, ends):
    """Rows up to the first of `ends`, that one included."""
    return [row[: min((row.index(e) + 1 for e in ends if e in row), default=NEW)] for row in rows]


def test_each_row_stops_at_any_end_token(model, prompts, hot):
    ends = [hot.rows[0][3], hot.rows[1][8]]
    expected = ended(hot.rows, ends)
    assert len(set(map(len, expected))) > 2
    for drafts in (0, 3):
        found = generate(model, prompts, max_new_tokens=NEW, eos=ends, draft_tokens=drafts, **HOT)
        assert found.rows == expected
        behind = np.arange(NEW) >= found.lengths[:, None]
        assert (found.tokens[behind] == 12).all() and found.stats.new_tokens == sum(found.lengths)
    one = generate(model, prompts, max_new_tokens=NEW, eos=ends[0], **HOT)
    assert one.rows == ended(hot.rows, ends[:1])
    first = hot.rows[0][0]
    at_once = generate(model, prompts[:1], max_new_tokens=NEW, eos=first, **HOT)
    assert at_once.rows == [[first]] and at_once.stats.trunk_calls == 0


@pytest.mark.parametrize(("eos", "pad"), [([5, 3], None), (3, None), (3, 11), (None, None)])
def test_the_config_says_what_ends_a_row_and_what_stands_behind(model, prompts, hot, eos, pad):
    import dataclasses

    ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    named = glm.TextModel.from_leaves(
        dataclasses.replace(model.config, eos_token_ids=ids, pad_token_id=pad),
        {".".join(map(str, path)): leaf[...] for path, leaf in glm_leaves(model)},
    )
    found = generate(named, prompts, max_new_tokens=NEW, **HOT)
    assert found.rows == ended(hot.rows, ids)
    behind = np.arange(NEW) >= found.lengths[:, None]
    right = pad if pad is not None else ids[0] if ids else 0
    assert behind.any() == bool(ids) and (found.tokens[behind] == right).all()
    # Asked for, no token ends a row.
    assert generate(named, prompts, max_new_tokens=NEW, eos=(), **HOT).rows == hot.rows


def glm_leaves(model):
    from flax import nnx

    return [(p, v) for p, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)]


@pytest.mark.parametrize("drafts", [0, 3])
def test_tokens_are_given_out_as_they_come_rows_in_turn(model, prompts, hot, drafts):
    given = []
    ends = [hot.rows[0][3]]
    found = generate(
        model,
        prompts,
        max_new_tokens=NEW,
        eos=ends,
        draft_tokens=drafts,
        on_token=lambda row, token: given.append((row, token)),
        **HOT,
    )
    assert [[t for row, t in given if row == i] for i in range(4)] == found.rows
    assert all(type(row) is int and type(token) is int for row, token in given)
    if not drafts:
        order = [(row, n) for n in range(NEW) for row in range(4) if n < found.lengths[row]]
        assert [row for row, _ in given] == [row for row, _ in order]


def test_a_callback_may_break_off(model, prompts):
    seen = []

    def stop(row, token):
        seen.append(token)
        if len(seen) == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(model, prompts, max_new_tokens=NEW, on_token=stop)
    assert len(seen) == 6


def test_one_compilation_serves_all_positions_prompts_of_a_bucket_and_settings(model):
    before = generation._step._cache_size()
    for length, new, temperature in ((17, 9, 0.5), (20, 12, 2.0), (31, 1, 0.5), (21, 10, 1.0)):
        generate(model, [[1] * length], max_new_tokens=new, temperature=temperature, top_k=3)
    assert generation._step._cache_size() == before + 1
    generate(model, [[1] * 33], max_new_tokens=9, temperature=0.5, top_k=3)
    assert generation._step._cache_size() == before + 2


def test_sizes_are_rounded_up_to_few():
    sizes = [generation._roomy(n) for n in range(1, 5000)]
    assert sizes == sorted(sizes) and len(set(sizes)) < 32
    assert all(n <= size <= max(n + 15, 1.25 * n) for n, size in enumerate(sizes, 1))
    for columns in (1, 16, 17, 1024, 1025, 3000):
        widths = generation._chunk_widths(columns)
        assert columns <= sum(widths) < max(17, columns + 1024) and max(widths) <= 1024


def test_nan_is_an_error_that_names_the_row(model, prompts):
    leaves = {".".join(map(str, path)): np.array(leaf[...]) for path, leaf in glm_leaves(model)}
    leaves["embed_tokens"][9] = np.nan
    broken = glm.TextModel.from_leaves(model.config, leaves)
    with pytest.raises(FloatingPointError, match="row 1: after 3 tokens the logits are NaN"):
        generate(broken, [[1, 2], [3, 9, 1]], max_new_tokens=2)


def test_drafts_need_the_head(tmp_path, model, prompts):
    path = make_tiny(tmp_path / "tiny", CONFIG)
    with pytest.raises(ValueError, match="load it with mtp=True"):
        generate(glm.load(path), prompts, draft_tokens=1)
    plain = make_tiny(tmp_path / "plain", CONFIG | {"num_nextn_predict_layers": 0})
    with pytest.raises(glm.CheckpointError, match="MTP layer was asked for"):
        glm.load(plain, mtp=True)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"tokens": [[1, 2], []]}, "row 1"),
        ({"tokens": []}, "tokens"),
        ({"tokens": [1, 2]}, "row 0"),
        ({"tokens": [[1.5]]}, "float64"),
        ({"tokens": [[13]]}, "from 0 to 12, got 13"),
        ({"tokens": [[-1]]}, "got -1"),
        ({"tokens": [[2**40]]}, str(2**40)),
        ({"tokens": np.array([1, 2])}, r"\[B, T\]"),
        ({"tokens": [[1]], "mask": np.ones((1, 1))}, "mask"),
        (
            {"tokens": np.ones((2, 3), int), "mask": np.array([[1, 0, 1]] * 2)},
            "row 0 .* contiguous",
        ),
        ({"tokens": np.ones((2, 2), int), "mask": np.array([[1, 1], [0, 0]])}, "row 1"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected at least 1, got 0"),
        ({"draft_tokens": -1}, "draft_tokens"),
        ({"top_k": 3}, "temperature"),
        ({"eos": -2}, "eos"),
        ({"eos": "12"}, "eos"),
        ({"eos": [1.0]}, "eos"),
    ],
)
def test_bad_input_is_one_line(model, arguments, named):
    with pytest.raises(ValueError, match=named) as error:
        generate(model, **{"tokens": [[1, 2]]} | arguments)
    assert "\n" not in str(error.value)
