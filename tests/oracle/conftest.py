"""Fixtures shared by the tests that call the transformers oracle (the `oracle` extra)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glm5_jax.numerics.oracle import build_oracle, oracle_available
from glm5_jax.numerics.random_models import (
    random_batch,
    random_config,
    randomize,
    write_checkpoint,
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A random model as transformers saved it, and a batch for it."""

    seed: int
    config: dict[str, Any]
    directory: Path
    tokens: np.ndarray
    mask: np.ndarray | None

    @property
    def real(self) -> np.ndarray:
        """[B, T] bool: where logits are compared."""
        return np.ones(self.tokens.shape, bool) if self.mask is None else self.mask.astype(bool)


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
def random_case(tmp_path_factory) -> Callable[..., Case]:
    """`random_case(seed, **changes)`: text config fields in `changes` replace the drawn ones."""

    def make(seed: int, **changes: Any) -> Case:
        rng = np.random.default_rng(seed)
        config = random_config(rng)
        config["text_config"].update(changes)
        model = randomize(build_oracle(config), rng)
        directory = write_checkpoint(model, tmp_path_factory.mktemp(f"model{seed}"))
        return Case(seed, config, directory, *random_batch(config, rng))

    return make
