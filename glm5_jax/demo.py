"""The whole way once, on a tiny checkpoint: write, audit, convert, verify, run, compare."""

import shutil
import tempfile
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from glm5_jax.checkpoint.audit import audit
from glm5_jax.checkpoint.convert import convert
from glm5_jax.checkpoint.tiny import make_tiny
from glm5_jax.checkpoint.verify import verify
from glm5_jax.errors import CheckpointError
from glm5_jax.generation import generate
from glm5_jax.model import TextModel, load
from glm5_jax.numerics.oracle import oracle_available, oracle_logits, oracle_model
from glm5_jax.token_batch import left_padded

NEW_TOKENS = 8
PROMPTS = ((17, 4, 99, 23, 151, 8, 64, 3, 200, 42, 77, 6), (5, 150, 31, 12, 90, 188, 2))

# A float32 run and the oracle's differ by rounding alone: a fraction of this on the tiny model.
AGREEMENT = 1e-4


def run_demo(out: Path | None = None) -> bool:
    """Run it in `out` (kept; must not exist) or in a temporary directory; False if numbers part.

    Raises:
        CheckpointError: `out` exists.
    """
    if out is not None:
        if out.exists():
            raise CheckpointError(f"{out}: exists already; choose another directory or delete it")
        out.mkdir(parents=True)
        return _steps(out)
    directory = Path(tempfile.mkdtemp(prefix="glm5-jax-demo-"))
    try:
        return _steps(directory)
    finally:
        shutil.rmtree(directory)


def _steps(directory: Path) -> bool:
    console = Console(highlight=False, soft_wrap=True)
    source, orbax = directory / "safetensors", directory / "orbax"

    console.rule("a tiny checkpoint in the released layout")
    console.print(str(make_tiny(source, shards=2)))

    console.rule("audit")
    report = audit(source)
    print(report.to_text())

    console.rule("convert to Orbax, verify against the ledger")
    print(convert(source, orbax).to_text())
    verified = verify(orbax)
    print("\n".join(verified.problems) or f"verified: {verified.checked} leaves as written")

    console.rule("a jitted forward pass from both directories")
    tokens, mask = left_padded(PROMPTS)
    forward = jax.jit(TextModel.__call__)
    model, other = load(orbax), load(source)
    restored, direct = (np.asarray(forward(m, tokens, mask)) for m in (model, other))
    same = np.array_equal(restored, direct)
    print(
        f"logits {restored.shape} {restored.dtype}: Orbax and safetensors are "
        f"{'bit-identical' if same else 'DIFFERENT'}"
    )

    console.rule("greedy generation, with a cache")
    generation, twin = (generate(m, PROMPTS, max_new_tokens=NEW_TOKENS) for m in (model, other))
    for prompt, continuation in zip(PROMPTS, generation.rows, strict=True):
        print(f"{list(prompt)} → {continuation}")
    continued = generation.rows == twin.rows
    print(f"{generation.stats}; both directories {'agree' if continued else 'are APART'}")

    ours = report.complete and verified.ok and same and continued
    return ours and _agrees_with_oracle(console, source)


def _agrees_with_oracle(console: Console, source: Path) -> bool:
    console.rule("transformers on the same weights, float32")
    if not oracle_available():
        print("not installed (extra: oracle)")
        return True
    tokens, mask = left_padded(PROMPTS)
    ours = np.asarray(load(source, dtype="float32")(tokens, mask))
    theirs = oracle_logits(oracle_model(source, "float32"), tokens, mask)
    apart = float(np.abs(ours - theirs)[mask].max() / np.abs(theirs[mask]).max())
    agrees = apart < AGREEMENT
    print(f"largest difference {apart:.1e} of the largest logit: {'agrees' if agrees else 'APART'}")
    return agrees
