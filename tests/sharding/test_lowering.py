"""The released geometry, cut over eight H200s that are not at hand, lowers with its GPU kernels.

Each device's kernels take its own rows, heads and tokens. A mesh without any device will not do,
as `nn/largest.py` needs devices to be lowered: on JAX 0.11 with the extra `aot` the eight are H200s
that a compiler stands for. Elsewhere they are a CPU's, and XLA's forms take the place of kernels.
With GLM5_JAX_GATES set, as in CI, the extra must be there, and two layers are compiled too.
"""

import json
import math
import os
import re
from collections import Counter
from pathlib import Path

import pytest

from pallas_kernels.aot import CannotCompile, toolkit

RELEASE = Path(__file__).parents[2] / "configs" / "glm5_3_flash.json"
GATES = "GLM5_JAX_GATES" in os.environ


def two_layers():
    """Of the release: KDA with a dense MLP, and DSA with experts."""
    config = json.loads(RELEASE.read_text())
    text = config["text_config"]
    for key in ("layer_types", "mlp_layer_types", "indexer_types"):
        text[key] = text[key][2:4]
    text["num_hidden_layers"] = 2
    text["linear_attn_config"] |= {"kda_layers": [0], "full_attn_layers": [1]}
    return config


@pytest.fixture(scope="module")
def on_h200s(run_apart, tmp_path_factory):
    try:
        root = str(toolkit())
    except CannotCompile as error:
        if GATES:
            pytest.fail(str(error))
        pytest.skip(str(error))
    few = tmp_path_factory.mktemp("few") / "config.json"
    few.write_text(json.dumps(two_layers()))
    settings = {
        "XLA_FLAGS": f"--xla_gpu_cuda_data_dir={root}",
        "MOSAIC_GPU_CUDA_ROOT": root,
        "LLVM_DISABLE_SYMBOLIZATION": "1",
    }
    arguments = ("h200", RELEASE, few) if GATES else ("h200", RELEASE)
    return run_apart("lowering.py", *arguments, **settings)


@pytest.fixture(scope="module")
def lowered(request, run_apart):
    """On H200s where that can be, else on a CPU's devices."""
    try:
        toolkit()
    except CannotCompile:
        return run_apart("lowering.py", "simulated", RELEASE)
    return request.getfixturevalue("on_h200s")


def cuts(found):
    return {(shape, cut): n for shape, cut, n in found["arguments"]}


@pytest.mark.parametrize("call", ["decode tp", "decode tp_ep", "prefill tp_ep", "prefill context"])
def test_arguments_are_cut_as_the_rules_say(lowered, call):
    found = cuts(lowered[call])
    # With such an axis, experts are cut between, and caches by rows.
    by = '{"expert"}' if "tp_ep" in call else "{}"
    expected = {
        ("154880x4096xbf16", '[{"tensor"}, {}]'): 2,  # the embedding and the head
        ("8192x4096xbf16", '[{"tensor"}, {}]'): 3 * 34,  # q, k and v of KDA
        ("4096x8192xbf16", '[{}, {"tensor"}]'): 34,  # its output
        ("24576x4xbf16", "[{}, {}]"): 34,  # its convolution
        ("32768x512xbf16", '[{"tensor"}, {}]'): 11,  # kv_b of DSA
        ("288x2048x4096xbf16", f'[{by}, {{"tensor"}}, {{}}]'): 2 * 42,
        ("288x4096x2048xbf16", f'[{by}, {{}}, {{"tensor"}}]'): 42,
        ("8x64x128x128xf32", f'[{by}, {{"tensor"}}, {{}}, {{}}]'): 34,  # recurrent states
        ("8x4096x512xbf16", f"[{by}, {{}}, {{}}]"): 11,  # latents
    }
    assert expected.items() <= found.items()


def test_codes_and_scales_are_cut_alike(lowered):
    found = cuts(lowered["decode tp fp8"])
    expected = {
        ("288x2048x4096xf8E4M3FN", '[{}, {"tensor"}, {}]'): 2 * 42,
        ("288x16x32xf32", '[{}, {"tensor"}, {}]'): 2 * 42,
        ("288x4096x2048xf8E4M3FN", '[{}, {}, {"tensor"}]'): 42,
        ("288x32x16xf32", '[{}, {}, {"tensor"}]'): 42,
    }
    assert expected.items() <= found.items()


@pytest.mark.parametrize(
    ("call", "rows", "heads", "tokens", "queries", "passes"),
    [
        ("decode tp", 8, 8, 1, 1, 0),  # one token is no chunk; queries are those of a block
        ("decode tp fp8", 8, 8, 1, 1, 0),
        ("decode tp_ep", 4, 16, 1, 1, 0),
        ("prefill tp_ep", 4, 16, 1024, 128, 1),
        ("prefill context", 8, 16, 512, 128, 2),
    ],
)
def test_each_device_runs_the_kernels_of_its_own_rows_heads_and_tokens(
    on_h200s, call, rows, heads, tokens, queries, passes
):
    *kda, attend = on_h200s[call]["kernels"]
    assert [calls for *_, calls in kda] == 2 * passes * [34]
    for prepare, scan in zip(kda[::2], kda[1::2], strict=True):
        q, k, g, beta = prepare[0]
        assert q == k == f"{rows}x{tokens}x{heads}x128xbf16"
        assert (g, beta) == (f"{rows}x{tokens}x{heads}x128xf32", f"{rows}x{heads}x{tokens}xf32")
        assert scan[0][-2:] == [q, f"{rows}x{heads}x128x128xf32"]
        assert scan[1] == scan[0][-2:]  # o, and the state
    # This kernel has room for 64 heads; what is more than a device's own are zeros.
    assert attend[0][:2] == [f"{rows * queries}x64x512xbf16", f"{rows}x4096x512xbf16"]
    assert attend[-1] == 11


@pytest.mark.skipif(not GATES, reason="compiled where GLM5_JAX_GATES is set")
def test_two_layers_compile_and_send_activations_alone(on_h200s):
    found = on_h200s["compiled"]
    compiled, counted = found["given"]
    assert compiled == counted  # weights, cache and tokens of a device, in bytes
    kept, made = found["kept"]
    assert 0 < made - kept < 1e6  # the cache stays in its place: what is made are 8 rows of logits
    sent = Counter()
    for kind, shape, n in found["sent"]:
        sent[kind, math.prod(map(int, re.findall(r"\d+", shape.partition("[")[2])))] += n
    assert sent == {
        # The embedding, two mixers, a dense MLP, a shared expert and the experts' width.
        ("all-reduce", 4 * 4096): 6,
        # The tokens of a layer of experts, with their choices and weights; their sums.
        ("all-gather", 8 * 4096): 1,
        ("all-gather", 8 * 8): 2,
        ("reduce-scatter", 4 * 4096): 1,
    }
