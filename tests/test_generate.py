"""Generation: the same tokens as whole forward passes, whatever is drafted, padded or batched."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import glm5_jax as glm
from glm5_jax import generation
from glm5_jax.checkpoint.tiny import make_tiny
from glm5_jax.drafts import draft
from glm5_jax.generation import generate
from glm5_jax.token_batch import right_padded

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
    "eos_token_id": [3, 7],
}
NEW = 14
LENGTHS = (19, 5, 1, 12)
GREEDY = {"max_new_tokens": NEW, "eos": ()}
HOT = GREEDY | {"temperature": 3.0, "seed": 4}
NOISE = GREEDY | {"temperature": 1e6}


def arrays_of(model):
    """Copies of the parameters, by path."""
    found = [(path, x) for path, x in nnx.iter_graph(model) if isinstance(x, nnx.Variable)]
    return {".".join(map(str, path)): np.array(x[...]) for path, x in found}


def ended(rows, ends):
    """Rows up to the first of `ends`, that one included."""
    return [row[: min((row.index(e) + 1 for e in ends if e in row), default=NEW)] for row in rows]


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
    return generate(model, prompts, **GREEDY)


@pytest.fixture(scope="module")
def hot(model, prompts):
    return generate(model, prompts, **HOT)


def test_greedy_tokens_are_those_of_whole_forward_passes(greedy, prompts, whole):
    assert greedy.tokens.shape == (4, NEW) and (greedy.lengths == NEW).all()
    assert len(set(greedy.tokens.ravel().tolist())) > 4  # it says more than one thing
    for prompt, row in zip(prompts, greedy.rows, strict=True):
        for n, token in enumerate(row):
            assert token == np.argmax(whole(prompt + row[:n]))


def test_a_row_alone_is_the_row_in_a_batch(model, prompts, hot):
    assert generate(model, prompts[:1], **HOT).rows == hot.rows[:1]


def test_padding_on_either_side_is_no_matter(model, prompts, greedy):
    tokens = np.full((4, 23), 7)
    mask = np.zeros((4, 23))
    for i, (start, prompt) in enumerate(zip((4, 18, 6, 3), prompts, strict=True)):
        tokens[i, start : start + len(prompt)] = prompt
        mask[i, start : start + len(prompt)] = 1
    assert generate(model, tokens, mask, **GREEDY).rows == greedy.rows


def test_a_long_prompt_in_chunks_is_one_prompt(model, prompts, greedy, monkeypatch):
    monkeypatch.setattr(generation, "PREFILL_WIDTHS", (16,))
    assert generation._chunk_widths(max(LENGTHS)) == [16, 16]
    assert generate(model, prompts, draft_tokens=1, **GREEDY).rows == greedy.rows


def test_without_drafts_the_head_has_no_cache(model, prompts, greedy):
    running = generation.begin(model, prompts, 32, None)
    assert model.mtp is not None and running.cache.mtp is None is running.cache.mtp_lengths
    np.testing.assert_array_equal(running.newest, [row[0] for row in greedy.rows])


def test_the_head_drafts_from_the_whole_prompt(model, prompts, monkeypatch):
    monkeypatch.setattr(generation, "PREFILL_WIDTHS", (16,))
    running = generation.begin(model, prompts, 32, None, drafts=1)
    np.testing.assert_array_equal(running.cache.mtp_lengths, np.subtract(LENGTHS, 1))

    @jax.jit
    def guesses(model, running):
        return draft(model, running.cache, running.pairs, 1, lambda x, _: x.argmax(-1))[0][:, 0]

    @jax.jit
    def whole(model, hidden, following, mask):
        output = model.mtp(hidden, model.embed_tokens[following], mask)
        return jnp.einsum("btx,vx->btv", output, model.lm_head[...]).argmax(-1)

    tokens = right_padded(prompts, 32)
    mask = np.arange(32) < np.array(LENGTHS)[:, None]
    hidden, _ = model.advance(tokens, model.init_cache(4, 32), mask)
    rows, last = np.arange(4), np.array(LENGTHS) - 1
    following = np.roll(tokens, -1, axis=1)
    following[rows, last] = running.newest
    right = whole(model, hidden, following, mask)[rows, last]
    np.testing.assert_array_equal(guesses(model, running), right)


@pytest.mark.parametrize("drafts", [1, 3])
@pytest.mark.parametrize("settings", [GREEDY, HOT, NOISE], ids=["greedy", "hot", "noise"])
def test_drafts_change_no_token(model, prompts, drafts, settings):
    plain = generate(model, prompts, **settings)
    drafted = generate(model, prompts, draft_tokens=drafts, **settings)
    np.testing.assert_array_equal(drafted.tokens, plain.tokens)
    assert plain.stats.trunk_calls == NEW - 1 and plain.stats.drafted == ()
    stats = drafted.stats
    assert len(stats.drafted) == len(stats.accepted) == drafts
    assert stats.drafted[0] >= stats.accepted[0] >= stats.accepted[-1]
    # A check of a row brings a token, and one for each draft that holds; the last may bring more.
    brought = stats.drafted[0] + sum(stats.accepted)
    assert 4 * (NEW - 1) <= brought <= 4 * (NEW - 1 + drafts)
    if settings == NOISE:
        # The head draws with the noise that the trunk will draw with, and that alone decides.
        assert stats.accepted == stats.drafted
        assert stats.trunk_calls == -(-(NEW - 1) // (drafts + 1))


def test_a_draw_hangs_on_seed_and_place_alone(model, prompts, hot):
    other = [prompts[0], [1, 2], [3], [4]]
    assert generate(model, other, **HOT).rows[0] == hot.rows[0]
    again = generate(model, prompts, **HOT | {"seed": 5})
    assert again.rows != hot.rows
    # What was generated may as well have been in the prompt.
    longer = [prompt + row[:6] for prompt, row in zip(prompts, hot.rows, strict=True)]
    rest = generate(model, longer, **HOT | {"max_new_tokens": NEW - 6})
    assert rest.rows == [row[6:] for row in hot.rows]


@pytest.mark.parametrize("drafts", [0, 3])
def test_each_row_stops_at_any_end_token(model, prompts, hot, drafts):
    def lengths(ends):
        return {len(row) for row in ended(hot.rows, ends)}

    ends = max(itertools.combinations(range(13), 2), key=lambda ends: len(lengths(ends)))
    expected = ended(hot.rows, ends)
    assert len(lengths(ends)) > 2
    found = generate(model, prompts, draft_tokens=drafts, **HOT | {"eos": ends})
    assert found.rows == expected and found.stats.new_tokens == sum(map(len, expected))
    behind = np.arange(NEW) >= found.lengths[:, None]
    assert (found.tokens[behind] == 12).all()  # the config's pad id


def test_one_end_token_may_come_at_once(model, prompts, hot):
    first = hot.rows[0][0]
    assert generate(model, prompts, **HOT | {"eos": np.array([first])}).rows == ended(
        hot.rows, [first]
    )
    at_once = generate(model, prompts[:1], **HOT | {"eos": first})
    assert at_once.rows == [[first]] and at_once.stats.trunk_calls == 0


def test_the_config_says_what_ends_a_row(model, prompts, hot):
    assert generate(model, prompts, **HOT | {"eos": None}).rows == ended(hot.rows, [3, 7])
    assert ended(hot.rows, [3, 7]) not in (hot.rows, ended(hot.rows, [3]), ended(hot.rows, [7]))


def test_without_a_pad_id_the_first_end_token_stands_behind(model):
    config = dataclasses.replace(model.config, pad_token_id=None)
    padless = glm.TextModel.from_leaves(config, arrays_of(model))
    found = generate(padless, [[1] * 19], **HOT | {"eos": [7, *range(13)]})
    assert found.lengths == [1] and found.tokens[0, 1] == 7


@pytest.mark.parametrize("drafts", [0, 3])
def test_tokens_are_given_out_as_they_come_rows_in_turn(model, prompts, hot, drafts):
    given = []
    settings = HOT | {"eos": hot.rows[1][3], "draft_tokens": drafts}
    found = generate(model, prompts, on_token=lambda *place: given.append(place), **settings)
    assert [[t for row, t in given if row == i] for i in range(4)] == found.rows
    assert all(type(value) is int for place in given for value in place)
    if not drafts:
        order = [row for n in range(NEW) for row in range(4) if n < found.lengths[row]]
        assert [row for row, _ in given] == order


def test_a_callback_may_break_off(model, prompts):
    seen = []

    def stop(row, token):
        seen.append(token)
        if len(seen) == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(model, prompts, on_token=stop, **GREEDY)
    assert len(seen) == 6


def test_one_compilation_serves_all_positions_prompts_of_a_bucket_and_numbers(model):
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **details: compiled.append(event) if "compile" in event else None
    )
    counts = []
    for length, new, temperature, seed in ((17, 9, 0.5, 0), (20, 12, 2.0, 1), (31, 2, 0.7, 2)):
        settings = {"max_new_tokens": new, "temperature": temperature, "seed": seed}
        assert generate(model, [[1] * length], **settings).stats.trunk_calls > 0
        counts.append(len(compiled))
    assert counts[1:] == counts[:-1]
    jax.jit(lambda x: x + 1)(1)
    assert len(compiled) > counts[-1]  # it does count


def test_sizes_are_rounded_up_to_few():
    sizes = [generation._roomy(n) for n in range(1, 5000)]
    assert sizes == sorted(sizes) and len(set(sizes)) < 32
    assert all(n <= size <= max(n + 15, 1.25 * n) for n, size in enumerate(sizes, 1))
    for columns in range(1, 5000):
        widths = generation._chunk_widths(columns)
        assert set(widths) <= {1024, 256, 64, 16} and columns <= sum(widths) < 2 * columns + 16
    assert generation._chunk_widths(2 * 1024 + 300) == [1024, 1024, 256, 64]


def test_the_statistics_read_as_a_line():
    stats = generation.Stats(19, 64, 31, (62, 62), (40, 9), 0.5, 0.25, 2.0, 60)
    assert str(stats) == (
        "19 prompt tokens in 0.50 s; 64 new ones, 31 calls after the prompt's; "
        "30.0 tokens/s after a first step of 0.25 s; drafts accepted: 40/62, 9/62"
    )


def test_nan_is_an_error_that_names_the_row(model, prompts):
    arrays = arrays_of(model)
    arrays["embed_tokens"][9] = np.nan
    broken = glm.TextModel.from_leaves(model.config, arrays)
    with pytest.raises(FloatingPointError, match="row 1: after 3 tokens the logits are NaN"):
        generate(broken, [[1] * 19, [3, 9, 1], [1], [9]], **GREEDY)


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
        ({"eos": 1.0}, "eos"),
    ],
)
def test_bad_input_is_one_line(model, arguments, named):
    with pytest.raises(ValueError, match=named) as error:
        generate(model, **{"tokens": [[1, 2]]} | arguments)
    assert "\n" not in str(error.value)
