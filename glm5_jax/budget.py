"""Bytes: what the parameters weigh by role, and what a sequence keeps in memory.

Everything follows from the config, the skeleton and the spec table; nothing is loaded. No JAX here.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, replace
from typing import Any

from .config import ModelConfig
from .errors import ConfigError
from .skeleton import Skeleton
from .specs import PARTS, ROLES, Part, stored_tensors

DISK_BYTES = {"BF16": 2, "F32": 4}
ACTIVATION_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
TOKEN_INDEX_BYTES = 4  # an expert id is int32 in every dtype
VALIDITY_BYTES = 1
COUNTER_BYTES = 4
# The fields of a StateBudget that are in none of its sums.
APART = (
    "dsa_bytes_per_pool",
    "counters",
    "mtp_per_token",
    "mtp_bytes_per_pool",
    "mtp_counters",
)


@dataclass(frozen=True)
class ParameterCount:
    """How many tensors, how many numbers in them, how many bytes as a BF16 release stores them."""

    tensors: int = 0
    parameters: int = 0
    bytes: int = 0

    def __add__(self, other: ParameterCount) -> ParameterCount:
        return ParameterCount(
            self.tensors + other.tensors,
            self.parameters + other.parameters,
            self.bytes + other.bytes,
        )


@dataclass(frozen=True)
class ParameterRow:
    """The tensors of one role in one part of the model."""

    part: Part
    role: str
    count: ParameterCount


@dataclass(frozen=True)
class ParameterBudget:
    """Every tensor of the model under its part and role, in checkpoint order."""

    rows: tuple[ParameterRow, ...]

    @property
    def total(self) -> ParameterCount:
        """Text, MTP and vision together."""
        return sum((row.count for row in self.rows), ParameterCount())

    def by_role(self) -> dict[str, ParameterCount]:
        """Counts per role over the parts, in the order in which an audit lists them."""
        counts: defaultdict[str, ParameterCount] = defaultdict(ParameterCount)
        for row in self.rows:
            counts[row.role] += row.count
        return {role: counts[role] for role in ROLES if role in counts}

    def by_part(self) -> dict[Part, ParameterCount]:
        """Counts of `text`, `mtp` and `vision`; a part that the config lacks counts zero."""
        counts: dict[Part, ParameterCount] = dict.fromkeys(PARTS, ParameterCount())
        for row in self.rows:
            counts[row.part] += row.count
        return counts


def parameter_budget(config: ModelConfig) -> ParameterBudget:
    """Count tensors, parameters and bytes of an unquantised release of `config`, by part and role.

    Bytes are those of the required disk dtypes (BF16, and F32 for what must be float32).
    """
    # Many tensors have one role and one size (the experts): count those, then multiply.
    alike = Counter(
        (stored.part, stored.role, stored.shape, stored.dtype) for stored in stored_tensors(config)
    )
    rows: defaultdict[tuple[Part, str], ParameterCount] = defaultdict(ParameterCount)
    for (part, role, shape, dtype), tensors in alike.items():
        size = tensors * math.prod(shape)
        rows[part, role] += ParameterCount(tensors, size, size * DISK_BYTES[dtype])
    return ParameterBudget(
        tuple(ParameterRow(part, role, count) for (part, role), count in rows.items())
    )


@dataclass(frozen=True)
class StateBudget:
    """Bytes that one sequence keeps: some once, some for every token it has seen.

    kda_recurrent: the recurrent states, float32 in every model dtype (float64 in float64).
    kda_conv: the last K−1 columns before the convolution, and `rewind` columns more to return to.
    kda_replay: what a return of `rewind` tokens needs: k and v, and g and beta in float32.
    dsa_kv_per_token: the latent c that all heads attend to.
    dsa_indexer_per_token: the index key, the pool gate, and one byte of validity; that byte alone
    for a layer that shares another's selection.
    streams_per_token: the M residual streams of a forward pass, in float32.
    routing_per_token: one layer's router logits, and the ids and weights of the chosen experts.
    kda_heads: how many heads the KDA bytes are spread over (for `per_rank`).

    Counted apart, in none of the sums below, is what a cache has besides:
    dsa_bytes_per_pool: the keys of a complete pool of tokens.
    counters: how many tokens the sequence has, and how many of them it can go back.
    mtp_per_token, mtp_bytes_per_pool, mtp_counters: the MTP layer's own cache, all of it.
    """

    kda_recurrent: int
    kda_conv: int
    kda_replay: int
    dsa_kv_per_token: int
    dsa_indexer_per_token: int
    streams_per_token: int
    routing_per_token: int
    kda_heads: int
    dsa_bytes_per_pool: int
    counters: int
    mtp_per_token: int
    mtp_bytes_per_pool: int
    mtp_counters: int

    def fixed(self) -> int:
        """Bytes that do not grow with the sequence."""
        return self.kda_recurrent + self.kda_conv + self.kda_replay

    def per_token(self) -> int:
        """Bytes that every token of the sequence adds, MTP's own cache left out."""
        return (
            self.dsa_kv_per_token
            + self.dsa_indexer_per_token
            + self.streams_per_token
            + self.routing_per_token
        )

    def for_sequence(self, tokens: int) -> int:
        """Bytes of a sequence of `tokens` tokens processed in one pass."""
        if tokens < 0:
            raise ConfigError(f"a sequence has 0 tokens or more, got {tokens}")
        return self.fixed() + tokens * self.per_token()

    def per_rank(self, ranks: int) -> StateBudget:
        """Budget of one of `ranks` devices when heads are sharded over them.

        KDA's recurrent state, conv columns and replay have a head axis and are divided. The latent,
        indexer, streams and routing stay whole: there is one latent head, and every rank's query
        heads attend to all of it, so a rank that held a share of it could not compute its scores.
        The indexer's key and gate are one per token for all index heads likewise.
        """
        if ranks < 1 or self.kda_heads % ranks:
            raise ConfigError(
                f"{self.kda_heads} KDA heads cannot be divided over {ranks} ranks; "
                f"choose a divisor of {self.kda_heads}"
            )
        return replace(
            self,
            kda_recurrent=self.kda_recurrent // ranks,
            kda_conv=self.kda_conv // ranks,
            kda_replay=self.kda_replay // ranks,
            kda_heads=self.kda_heads // ranks,
        )


def state_budget(config: ModelConfig, dtype: str = "bfloat16", rewind: int = 0) -> StateBudget:
    """Per-sequence state of `config` in an activation dtype, able to go back `rewind` tokens.

    `dtype` is "bfloat16", "float32", "float64", or "stored" (what config.json names, else
    bfloat16). In float64 everything that is float32 otherwise is float64.
    """
    if dtype == "stored":
        dtype = config.dtype or "bfloat16"
    if dtype not in ACTIVATION_BYTES:
        raise ConfigError(f"dtype must be one of {', '.join(ACTIVATION_BYTES)}, got {dtype!r}")
    if rewind < 0:
        raise ConfigError(f"rewind must be 0 tokens or more, got {rewind}")
    skeleton = Skeleton.from_config(config)
    plan = skeleton.state_plan()
    indexers = sum(layer.indexer == "full" for layer in skeleton.layers)
    kda = sum(entry.kind == "recurrent" for entry in plan)
    sparse = sum(entry.kind == "sparse_kv" and not entry.is_mtp for entry in plan)
    mtp = sum(entry.is_mtp for entry in plan)

    narrow = ACTIVATION_BYTES[dtype]
    wide = max(narrow, ACTIVATION_BYTES["float32"])
    heads, width = config.linear_num_heads, config.linear_head_dim
    columns = config.linear_conv_kernel_dim - 1 + rewind
    latent = config.kv_lora_rank * narrow
    pool = config.index_head_dim * narrow
    indexer = 2 * config.index_head_dim * narrow
    chosen = config.num_experts_per_tok * (TOKEN_INDEX_BYTES + wide)
    routed = config.n_routed_experts * wide + chosen
    return StateBudget(
        kda_recurrent=kda * heads * width * width * wide,
        kda_conv=kda * 3 * heads * width * columns * narrow,
        kda_replay=kda * rewind * heads * (2 * width * narrow + (width + 1) * wide),
        dsa_kv_per_token=sparse * latent,
        dsa_indexer_per_token=indexers * indexer + sparse * VALIDITY_BYTES,
        streams_per_token=config.hc_mult * config.hidden_size * wide,
        routing_per_token=routed if "moe" in config.mlp_layer_types else 0,
        kda_heads=heads,
        dsa_bytes_per_pool=indexers * pool,
        counters=2 * COUNTER_BYTES,
        mtp_per_token=mtp * (latent + indexer + VALIDITY_BYTES),
        mtp_bytes_per_pool=mtp * pool,
        mtp_counters=mtp * COUNTER_BYTES,
    )


def budget_dict(
    config: ModelConfig, dtype: str = "bfloat16", rewind: int = 0, tokens: int = 131_072
) -> dict[str, Any]:
    """Both budgets as plain numbers, for JSON: `parameters` by role and part, `state` in bytes."""
    parameters, state = parameter_budget(config), state_budget(config, dtype, rewind)
    return {
        "parameters": {
            "total": asdict(parameters.total),
            "by_part": {part: asdict(count) for part, count in parameters.by_part().items()},
            "by_role": {role: asdict(count) for role, count in parameters.by_role().items()},
        },
        "state": {
            "dtype": dtype,
            "rewind": rewind,
            "tokens": tokens,
            **asdict(state),
            "fixed": state.fixed(),
            "per_token": state.per_token(),
            "for_sequence": state.for_sequence(tokens),
        },
    }


def budget_text(
    config: ModelConfig, dtype: str = "bfloat16", rewind: int = 0, tokens: int = 131_072
) -> str:
    """Both budgets as a table to read; see `budget_dict` for the numbers."""
    parameters, state = parameter_budget(config), state_budget(config, dtype, rewind)
    row = "{:<18}{:>9}{:>20}{:>20}".format
    lines = [row("role", "tensors", "parameters", "bytes")]
    sections = [parameters.by_role().items(), parameters.by_part().items()]
    for section in (*sections, [("total", parameters.total)]):
        lines += [
            row(name, f"{n.tensors:,}", f"{n.parameters:,}", f"{n.bytes:,}") for name, n in section
        ]
        lines.append("")
    lines.append(f"state of one sequence, {dtype}, able to go back {rewind} tokens")
    entry = "{:<26}{:>20} B{}".format
    for name, size in asdict(state).items():
        if name == "kda_heads":
            continue
        unit = next((f" per {u}" for u in ("token", "pool") if name.endswith(f"per_{u}")), "")
        apart = ", counted apart" if name in APART else ""
        lines.append(entry(name, f"{size:,}", unit + apart))
    lines.append(entry("fixed", f"{state.fixed():,}", ""))
    lines.append(entry("per_token", f"{state.per_token():,}", " per token"))
    lines.append(entry(f"{tokens:,} tokens", f"{state.for_sequence(tokens):,}", ""))
    return "\n".join(lines)
