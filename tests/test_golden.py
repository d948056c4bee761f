"""Parity with transformers where torch is not installed: small models with committed numbers."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import glm5_jax

GOLDEN = Path(__file__).parent / "golden" / "parity"
NAMES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())


def distance(ours: np.ndarray, truth: np.ndarray) -> float:
    return float(np.linalg.norm(ours.astype(np.float64) - truth) / np.linalg.norm(truth))


# One of them also with the code that users run.
@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.codegen if name == "released_shape" else ())
        for name in NAMES
    ],
)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def expected(name):
    return load_file(GOLDEN / f"{name}.safetensors")


@pytest.fixture(scope="module")
def traced(name, expected):
    """The float64 run: logits and every site."""
    sites: dict[str, np.ndarray] = {}
    model = glm5_jax.load(GOLDEN / name, dtype="float64")
    logits = model(
        expected["tokens"],
        expected["mask"],
        record=lambda site, value: sites.__setitem__(site, np.asarray(value)),
    )
    return np.asarray(logits), sites


def test_three_models_are_committed():
    assert len(NAMES) == 3


def test_float64_logits_agree_to_1e_10_of_their_scale(traced, expected):
    logits, _ = traced
    assert logits.dtype == np.float64
    error = np.abs(logits[expected["mask"] == 1] - expected["logits"]).max()
    assert error <= 1e-10 * np.abs(expected["logits"]).max()


def test_every_sublayer_gives_and_chooses_the_same(traced, expected):
    _, sites = traced
    real = expected["mask"] == 1
    compared = set(expected) - {"tokens", "mask", "logits"}
    assert len(compared) >= 6
    for site in compared:
        ours, theirs = sites[site][real], expected[site]
        if np.issubdtype(theirs.dtype, np.integer):
            np.testing.assert_array_equal(np.sort(ours), np.sort(theirs), err_msg=site)
        else:
            assert distance(ours, theirs) < 1e-11, site


@pytest.mark.codegen
def test_float32_logits_agree_to_float32_rounding():
    path = GOLDEN / "released_shape"
    expected = load_file(path.with_suffix(".safetensors"))
    logits = glm5_jax.load(path, dtype="float32")(expected["tokens"], expected["mask"])
    assert logits.dtype == np.float32
    assert distance(np.asarray(logits)[expected["mask"] == 1], expected["logits"]) < 5e-6
