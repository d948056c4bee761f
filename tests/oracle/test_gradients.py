"""`jax.grad` through the whole text model against transformers' autograd."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import glm5_jax
from glm5_jax.checkpoint.restore import load_leaves
from glm5_jax.numerics.oracle import oracle_model, write_gradients

pytest.importorskip("torch", reason="the oracle extra is not installed")
pytest.importorskip("transformers.models.glm5_next", reason="the oracle extra is not installed")

LAYERS = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "deepseek_sparse_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "indexer_types": ["full", "full", "shared"],
    "index_kpool": 2,
    "index_topk": 6,
    "swiglu_limit": 1.0,
}


def loss(model, tokens, mask):
    """Mean cross entropy of the next token, over pairs of real positions."""
    log_p = jax.nn.log_softmax(model(tokens, mask)[:, :-1])
    picked = jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1)[..., 0]
    pairs = mask[:, 1:] & mask[:, :-1]
    return -jnp.sum(jnp.where(pairs, picked, 0)) / jnp.sum(pairs)


# Autograd's are stored in float32, so float64 is judged to that rounding.
TOLERANCE = {"float64": 1e-6, "float32": 1e-4}


@pytest.fixture(scope="module", params=TOLERANCE)
def gradients(request, random_case, tmp_path_factory):
    """Both losses, both gradients by leaf path (transformers' in float64), and the tolerance."""
    case = random_case(5, **LAYERS)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, case.config["text_config"]["vocab_size"], (2, 40)).astype(np.int32)
    mask = np.arange(40) >= np.array([[0], [7]])

    directory = tmp_path_factory.mktemp("gradients")
    theirs_loss = write_gradients(oracle_model(case.directory, "float64"), tokens, directory, mask)
    _, theirs = load_leaves(directory, dtype="float64")

    model = glm5_jax.load(case.directory, dtype=request.param)
    ours_loss, ours = nnx.jit(nnx.value_and_grad(loss))(model, tokens, mask)
    paths = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(ours)}
    ours = {path: np.asarray(leaf[...], np.float64) for path, leaf in paths.items()}
    theirs = {path: np.asarray(leaf) for path, leaf in theirs.items()}
    return float(ours_loss), theirs_loss, ours, theirs, TOLERANCE[request.param]


def test_loss_is_the_same(gradients):
    ours, theirs, *_ = gradients
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_every_leaf_is_autograds(gradients):
    _, _, ours, theirs, tolerance = gradients
    assert ours.keys() == theirs.keys()
    compared = 0
    for path, truth in theirs.items():
        if ".indexer." in path or path.endswith("router.bias"):
            continue
        assert np.linalg.norm(truth) > 0, path
        assert np.linalg.norm(ours[path] - truth) <= tolerance * np.linalg.norm(truth), path
        compared += 1
    assert compared > 50


def test_what_only_chooses_has_exactly_no_gradient(gradients):
    ours = gradients[2]
    chooses = [path for path in ours if ".indexer." in path or path.endswith("router.bias")]
    assert len(chooses) == 7 + 2
    for path in chooses:
        assert not ours[path].any(), path
