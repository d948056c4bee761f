"""Fixtures shared by the tests that call the transformers oracle (the `oracle` extra)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import glm5_jax
from glm5_jax.numerics.choices import discrete_gaps, has_tie
from glm5_jax.numerics.oracle import build_oracle, oracle_available, oracle_model, oracle_sites
from glm5_jax.numerics.random_models import (
    random_batch,
    random_config,
    randomize,
    write_checkpoint,
)

Sites = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A random model as transformers saved it, a batch for it, and what both engines make of it."""

    seed: int
    config: dict[str, Any]
    directory: Path
    tokens: np.ndarray
    mask: np.ndarray | None

    @property
    def real(self) -> np.ndarray:
        """[B, T] bool: where logits are compared."""
        return np.ones(self.tokens.shape, bool) if self.mask is None else self.mask.astype(bool)

    @functools.cached_property
    def truth(self) -> Sites:
        """The float64 oracle's sites."""
        return self.oracle("float64")

    @property
    def logits(self) -> np.ndarray:
        """The float64 oracle's logits of real tokens, [n, vocab]."""
        return self.truth["final.head"][self.real]

    @property
    def tied(self) -> bool:
        """Whether the oracle made some choice between equals, so that it cannot judge."""
        return has_tie(self.truth, self.mask)

    def oracle(self, dtype: str) -> Sites:
        """The oracle's sites in another dtype."""
        return oracle_sites(oracle_model(self.directory, dtype), self.tokens, self.mask)

    @functools.cache  # noqa: B019 - a case lives as long as the session
    def ours(self, dtype: str) -> Sites:
        """Our model's sites, loaded straight from the files that transformers wrote."""
        sites: Sites = {}

        def record(name: str, value: Any) -> None:
            sites[name] = np.asarray(value)

        logits = glm5_jax.load(self.directory, dtype=dtype)(self.tokens, self.mask, record=record)
        assert "final.head" in sites
        sites["final.head"] = np.asarray(logits)
        return sites

    def flips(self, sites: Sites) -> dict[str, float]:
        """The choices in `sites` that are not the truth's, with the relative gap of that choice."""
        gaps = discrete_gaps(self.truth, self.mask)
        flipped = {}
        for site, gap in gaps.items():
            if site in sites:
                chosen, right = (np.sort(s[site][self.real], axis=-1) for s in (sites, self.truth))
                if not np.array_equal(chosen, right):
                    flipped[site] = gap.relative
        return flipped

    def errors(self, sites: Sites) -> np.ndarray:
        """Relative L2 distance of each real token's logits to the truth, [n]."""
        apart = sites["final.head"][self.real].astype(np.float64) - self.logits
        return np.linalg.norm(apart, axis=-1) / np.linalg.norm(self.logits, axis=-1)

    def error(self, sites: Sites) -> float:
        """Relative L2 distance of all logits to the truth."""
        apart = sites["final.head"][self.real].astype(np.float64) - self.logits
        return float(np.linalg.norm(apart) / np.linalg.norm(self.logits))


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread():
    """Tiny matrices: threads only wait for each other, and sums keep one order."""
    if not oracle_available():  # the test modules skip themselves
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_case(tmp_path_factory) -> Callable[..., Case]:
    """`make_case(config, seed)`: random weights and a random batch for a config dictionary.

    With `rng` the draws go on where the config's ended.
    """

    def make(config: dict[str, Any], seed: int, rng: np.random.Generator | None = None) -> Case:
        rng = np.random.default_rng(seed) if rng is None else rng
        model = randomize(build_oracle(config), rng)
        directory = write_checkpoint(model, tmp_path_factory.mktemp("model"))
        return Case(seed, config, directory, *random_batch(config, rng))

    return make


@pytest.fixture(scope="session")
def random_case(make_case) -> Callable[..., Case]:
    """`random_case(seed, **changes)`: text config fields in `changes` replace the drawn ones."""

    @functools.cache
    def plain(seed: int) -> Case:
        rng = np.random.default_rng(seed)
        return make_case(random_config(rng), seed, rng)

    def changed(seed: int, **changes: Any) -> Case:
        if not changes:
            return plain(seed)
        rng = np.random.default_rng(seed)
        config = random_config(rng)
        config["text_config"].update(changes)
        return make_case(config, seed, rng)

    return changed
