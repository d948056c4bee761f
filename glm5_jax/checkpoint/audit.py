"""Is every tensor of a checkpoint accounted for? The answer as numbers and names. No JAX here."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import ModelConfig
from ..specs import PARTS, ROLES, Naming, Part
from .layouts import Quantization, WrongTensor, combine_schemes
from .match import Layers, match, problem_lines
from .reader import Checkpoint, open_checkpoint

SHOWN = 10  # names of one kind that the text report prints


@dataclass(frozen=True, repr=False)
class AuditReport:
    """What a checkpoint holds, and what of it is not as the model needs it.

    `by_role` and its two companions count recognised tensors, a scale under its weight's role;
    `counts` and `parameters_by_part` have the keys text, mtp, vision. `parameters` counts unpacked
    weights (an NVFP4 byte is two), scales not at all. `ignored` gives, by reason, the names that
    are known and not bound. `widened` are F32 where BF16 is released, `accepted_bf16` BF16 where
    F32 is required, taken because the caller allowed it. `complete` says that nothing is missing,
    unexpected, wrong or contradictory.
    """

    path: str
    naming: Naming
    quantization: Quantization
    mtp: bool
    complete: bool
    total: int
    bytes: int
    parameters: int
    files: int
    counts: dict[Part, int]
    parameters_by_part: dict[Part, int]
    by_role: dict[str, int]
    bytes_by_role: dict[str, int]
    parameters_by_role: dict[str, int]
    missing: list[str]
    unexpected: list[str]
    wrong: list[WrongTensor]
    contradictions: list[str]
    ignored: dict[str, list[str]]
    widened: list[str]
    accepted_bf16: list[str]
    notices: list[str]
    config: ModelConfig

    def __repr__(self) -> str:
        return self.to_text()

    def to_dict(self) -> dict[str, Any]:
        """Everything but the config, in types that JSON has."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        del fields["config"]
        fields["wrong"] = [wrong._asdict() for wrong in self.wrong]
        return fields

    def to_json(self) -> str:
        """`to_dict` as indented JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def problems(self) -> list[str]:
        """Every fault as one line that names the tensor; empty when complete."""
        return problem_lines(self.contradictions, self.wrong, self.missing, self.unexpected)

    def to_text(self) -> str:
        """The report as a table for a terminal; long lists are cut, `to_json` has them whole."""
        lines = [
            f"{self.path}: {self.total:,} tensors in {self.files} files, {self.bytes:,} bytes",
            f"naming {self.naming} · quantization {self.quantization} · "
            f"MTP layer {'present' if self.mtp else 'absent'}",
            "",
            f"{'role':<18}{'tensors':>10}{'parameters':>18}{'bytes':>18}",
        ]
        for role, count in self.by_role.items():
            lines.append(
                f"{role:<18}{count:>10,}{self.parameters_by_role[role]:>18,}"
                f"{self.bytes_by_role[role]:>18,}"
            )
        lines.append(
            f"{'total':<18}{sum(self.by_role.values()):>10,}{self.parameters:>18,}"
            f"{sum(self.bytes_by_role.values()):>18,}"
        )
        lines.append("")
        lines += [
            f"{part:<18}{self.counts[part]:>10,}{self.parameters_by_part[part]:>18,}"
            for part in PARTS
        ]
        lines.append("")
        lines += [f"ignored {len(names):,}: {why}" for why, names in self.ignored.items()]
        if self.widened:
            lines.append(f"widened {len(self.widened):,}: F32 where the release has BF16")
        lines += [f"accepted as BF16, rounded: {name}" for name in self.accepted_bf16[:SHOWN]]
        lines += [f"config: {lost}" for lost in self.config.overridden]
        if self.config.defaulted:
            lines.append(f"config: by default: {', '.join(self.config.defaulted)}")
        lines += [f"note: {notice}" for notice in self.notices]
        for title in ("contradictions", "wrong", "missing", "unexpected"):
            found = getattr(self, title)
            lines.append(f"{title:<18}{len(found):>10,}")
            lines += [f"  {fault}" for fault in found[:SHOWN]]
            if len(found) > SHOWN:
                lines.append(f"  … and {len(found) - SHOWN:,} more (--json lists all)")
        lines.append("complete" if self.complete else "INCOMPLETE")
        return "\n".join(lines)


def audit(
    path: str | Path,
    layers: Layers = None,
    allow_bf16: bool = False,
) -> AuditReport:
    """Account for every tensor of a checkpoint directory, or of one .safetensors file.

    With `layers` (an index, indices, or text like `0-3,45`) only those layers must be there, and
    the tensors outside the layers; the MTP layer's index is the number of text layers. Reads
    headers only.
    Raises CheckpointError for files that can't be read and ConfigError for their config.json;
    whatever is wrong with the tensors is in the report.
    """
    checkpoint = open_checkpoint(path)
    return audit_checkpoint(checkpoint, checkpoint.config, layers, allow_bf16)


def audit_checkpoint(
    checkpoint: Checkpoint,
    config: ModelConfig,
    layers: Layers = None,
    allow_bf16: bool = False,
) -> AuditReport:
    """`audit` of an open checkpoint under a config given apart."""
    found = match(checkpoint, config, layers=layers, allow_bf16=allow_bf16)
    by_role: Counter[str] = Counter()
    bytes_by_role: Counter[str] = Counter()
    parameters_by_role: Counter[str] = Counter()
    counts: dict[Part, int] = dict.fromkeys(PARTS, 0)
    parameters_by_part: dict[Part, int] = dict.fromkeys(PARTS, 0)
    schemes = set()
    for spec, tensor, scheme, scales in found.entries:
        role, stored = spec.role, 1 + len(scales)
        elements = math.prod(spec.shape)
        by_role[role] += stored
        counts[spec.part] += stored
        bytes_by_role[role] += tensor.nbytes + sum(scale.nbytes for scale in scales)
        parameters_by_role[role] += elements
        parameters_by_part[spec.part] += elements
        if scheme is not None:
            schemes.add(scheme)
    notices = list(found.notices)
    if config.quantization is not None and not schemes:
        notices.append(
            f"config.json says quantised ({config.quantization.method}), no tensor is: what is "
            f"stored decides"
        )
    roles = [role for role in ROLES if by_role[role]]
    return AuditReport(
        path=str(checkpoint.directory),
        naming=found.naming,
        quantization=combine_schemes(schemes),
        mtp=counts["mtp"] > 0,
        complete=found.complete,
        total=len(checkpoint.tensors),
        bytes=sum(tensor.nbytes for tensor in checkpoint.tensors.values()),
        parameters=sum(parameters_by_part.values()),
        files=len(checkpoint.files),
        counts=counts,
        parameters_by_part=parameters_by_part,
        by_role={role: by_role[role] for role in roles},
        bytes_by_role={role: bytes_by_role[role] for role in roles},
        parameters_by_role={role: parameters_by_role[role] for role in roles},
        missing=found.missing,
        unexpected=found.unexpected,
        wrong=found.wrong,
        contradictions=found.contradictions,
        ignored=found.ignored,
        widened=found.widened,
        accepted_bf16=found.accepted_bf16,
        notices=notices,
        config=config,
    )
