"""Models with an MTP head, and the MTP step in NumPy: one row, float64, token by token.

The transformers oracle drops the MTP layer when it loads, so the numbers to compare with are made
here, from what the layer is, with nothing of `glm5_jax.nn`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from glm5_jax.checkpoint.restore import load_leaves
from glm5_jax.checkpoint.tiny import make_tiny
from glm5_jax.config import ModelConfig
from glm5_jax.model import TextModel
from glm5_jax.numerics.random_models import random_config


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rms_norm(x, weight, eps):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight


class Reference:
    """The MTP step of one row: `pairs` are inputs of the layer, in order of their slots."""

    def __init__(self, config: ModelConfig, arrays: Mapping[str, np.ndarray]):
        self.config = config
        self.arrays = {path: array.astype(np.float64) for path, array in arrays.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[f"mtp.{name}"]

    def norm(self, x, name):
        return rms_norm(x, self[name], self.config.rms_norm_eps)

    def pairs(self, hidden, tokens) -> np.ndarray:
        """[T, X] of h_t [T, X] and token_{t+1} [T]."""
        embedded = self.arrays["embed_tokens"][np.asarray(tokens)]
        halves = [self.norm(embedded, "enorm"), self.norm(np.asarray(hidden), "hnorm")]
        return np.concatenate(halves, axis=-1) @ self["eh_proj"].T

    def __call__(self, hidden, tokens) -> np.ndarray:
        """h' [T, X] of a whole row."""
        pairs = self.pairs(hidden, tokens)
        return np.stack([self.step(pairs, t) for t in range(len(pairs))])

    def logits(self, output) -> np.ndarray:
        return output @ self.arrays["lm_head"].T

    def step(self, pairs, t, selected=None) -> np.ndarray:
        """h' of the pair at slot t; `selected` tokens instead of the indexer's choice."""
        x = pairs[t]
        if selected is None:
            selected = self.select(pairs, t)
        x = x + self.attend(x, pairs, selected)
        x = x + self.feed_forward(self.norm(x, "layer.ffn_norm"))
        return self.norm(x, "shared_head_norm")

    def select(self, pairs, t) -> list[int]:
        """Tokens that the query at slot t attends to."""
        c = self.config
        P, ape = c.index_kpool, self["layer.attn.indexer.ape"]
        x = self.norm(pairs[: t + 1], "layer.attn_norm")
        keys = x @ self["layer.attn.indexer.wk"].T
        keys = keys - keys.mean(-1, keepdims=True)
        keys = keys / np.sqrt((keys**2).mean(-1, keepdims=True) + 1e-6)
        keys = keys * self["layer.attn.indexer.k_norm_weight"]
        keys = keys + self["layer.attn.indexer.k_norm_bias"]
        gates = x @ self["layer.attn.indexer.compress_gate"].T
        qr = self.norm(x[t] @ self["layer.attn.q_a_proj"].T, "layer.attn.q_a_norm")
        queries = (qr @ self["layer.attn.indexer.wq_b"].T).reshape(c.index_n_heads, -1)
        weights = x[t] @ self["layer.attn.indexer.weights_proj"].T * c.index_n_heads**-0.5
        scores = []
        for pool in range((t + 1) // P):
            slots = slice(pool * P, (pool + 1) * P)
            share = np.exp(gates[slots] + ape)
            key = (share / share.sum(0) * keys[slots]).sum(0)
            scores.append(weights @ np.maximum(queries @ key * c.index_head_dim**-0.5, 0))
        best = np.argsort(-np.array(scores), kind="stable")[: c.index_topk // P]
        chosen = [pool * P + slot for pool in best for slot in range(P)]
        tail = range((t + 1) // P * P, t + 1) if c.index_kpool_always_select_tail else ()
        return [*chosen, *tail]

    def attend(self, x, pairs, selected) -> np.ndarray:
        """The attention of the layer's input x over the pairs at the selected slots."""
        c = self.config
        heads, nope = c.num_attention_heads, c.qk_nope_head_dim
        x = self.norm(x, "layer.attn_norm")
        qr = self.norm(x @ self["layer.attn.q_a_proj"].T, "layer.attn.q_a_norm")
        queries = (qr @ self["layer.attn.q_b_proj"].T).reshape(heads, nope)
        out = np.zeros((heads, c.v_head_dim))
        if selected:
            seen = self.norm(pairs[selected], "layer.attn_norm") @ self["layer.attn.kv_a_proj"].T
            seen = self.norm(seen, "layer.attn.kv_a_norm")
            kv_b = self["layer.attn.kv_b_proj"].reshape(heads, -1, c.kv_lora_rank)
            for head in range(heads):
                keys, values = np.split(seen @ kv_b[head].T, [nope], axis=-1)
                dots = keys @ queries[head] * nope**-0.5
                shares = np.exp(dots - dots.max())
                out[head] = shares @ values / shares.sum()
        return out.reshape(-1) @ self["layer.attn.o_proj"].T

    def feed_forward(self, x) -> np.ndarray:
        """The chosen experts and the shared one."""
        c = self.config
        scores = sigmoid(self["layer.ffn.router.weight"] @ x)
        biased = scores + self["layer.ffn.router.bias"]
        groups = np.split(np.arange(c.n_routed_experts), c.n_group)
        if c.n_group > 1:
            groups.sort(key=lambda group: -np.sort(biased[group])[-2:].sum())
            groups = groups[: c.topk_group]
        chosen = sorted(np.concatenate(groups), key=lambda expert: -biased[expert])
        chosen = chosen[: c.num_experts_per_tok]
        total = sum(scores[chosen]) + 1e-20 if c.norm_topk_prob else 1.0
        out = self.swiglu(x, "layer.ffn.shared")
        for expert in chosen:
            weight = scores[expert] / total * c.routed_scaling_factor
            out = out + weight * self.swiglu(x, "layer.ffn.experts", expert)
        return out

    def swiglu(self, x, prefix, expert=...) -> np.ndarray:
        """Both halves clamped: the gate above, the other one on both sides."""
        limit = self.config.swiglu_limit
        gate, up, down = (self[f"{prefix}.{n}_proj"][expert] for n in ("gate", "up", "down"))
        gate, up = np.minimum(gate @ x, limit), np.clip(up @ x, -limit, limit)
        return down @ (gate * sigmoid(gate) * up)

    def draft(self, hidden, tokens, count: int, share: bool) -> tuple[list[int], np.ndarray]:
        """Greedy drafts after the last pair, and the logits of each.

        With `share` every draft attends to what the last true pair chose; else each runs the
        indexer over the true pairs and the drafts before it.
        """
        pairs = self.pairs(hidden, tokens)
        anchor = self.select(pairs, len(pairs) - 1)
        output = self.step(pairs, len(pairs) - 1)
        drafts, logits = [], []
        for _ in range(count):
            logits.append(self.logits(output))
            drafts.append(int(np.argmax(logits[-1])))
            pairs = np.concatenate([pairs, self.pairs(output[None], drafts[-1:])])
            output = self.step(pairs, len(pairs) - 1, anchor if share else None)
        return drafts, np.stack(logits)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model loaded with its MTP head, its parameters, and the reference of the head."""

    config: ModelConfig
    arrays: dict[str, np.ndarray]
    model: TextModel
    reference: Reference

    @classmethod
    def of(cls, config: ModelConfig, arrays: dict[str, np.ndarray]) -> Case:
        model = TextModel.from_leaves(config, arrays)
        return cls(model.config, arrays, model, Reference(model.config, arrays))

    def with_arrays(self, **changed: np.ndarray) -> Case:
        """The model with some of the head's parameters replaced (`eh_proj=...`)."""
        return self.of(self.config, {**self.arrays, **{f"mtp.{k}": v for k, v in changed.items()}})


@pytest.fixture(scope="session")
def make_case(tmp_path_factory) -> Callable[..., Case]:
    """`make_case(seed, **text)`: a random model in float64; `text` replaces config fields."""
    made: dict[str, Case] = {}

    def make(seed: int, **text: Any) -> Case:
        key = repr((seed, text))
        if key not in made:
            config = random_config(seed)
            config["text_config"] |= {"num_nextn_predict_layers": 1} | text
            directory = tmp_path_factory.mktemp("mtp") / "checkpoint"
            make_tiny(directory, config, seed=seed, dtype="float32")
            made[key] = Case.of(*load_leaves(directory, dtype="float64", mtp=True))
        return made[key]

    return make
