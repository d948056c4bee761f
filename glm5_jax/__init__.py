"""GLM-5.3-Flash in JAX: account for a checkpoint, convert it, run it.

Names are imported on first use, so that config, skeleton and audit never import JAX.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .budget import parameter_budget, state_budget
    from .checkpoint.audit import audit
    from .checkpoint.convert import convert
    from .checkpoint.export import export
    from .checkpoint.save import save
    from .checkpoint.tiny import make_tiny
    from .checkpoint.verify import verify
    from .config import ModelConfig, load_config
    from .errors import CheckpointError, ConfigError, TraceError
    from .generation import generate
    from .mesh_budget import device_budget
    from .model import TextModel, load
    from .numerics.compare import compare
    from .numerics.explain import explain
    from .numerics.trace import Trace
    from .numerics.tracing import trace
    from .sharding import ShardingRules
    from .skeleton import Skeleton
    from .streaming import LayerStream, stream_layers

__version__ = "0.1.0"

_HOME = {
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "LayerStream": "streaming",
    "ModelConfig": "config",
    "ShardingRules": "sharding",
    "Skeleton": "skeleton",
    "TextModel": "model",
    "Trace": "numerics.trace",
    "TraceError": "errors",
    "audit": "checkpoint.audit",
    "compare": "numerics.compare",
    "convert": "checkpoint.convert",
    "device_budget": "mesh_budget",
    "explain": "numerics.explain",
    "export": "checkpoint.export",
    "generate": "generation",
    "load": "model",
    "load_config": "config",
    "make_tiny": "checkpoint.tiny",
    "parameter_budget": "budget",
    "save": "checkpoint.save",
    "state_budget": "budget",
    "stream_layers": "streaming",
    "trace": "numerics.tracing",
    "verify": "checkpoint.verify",
}

__all__ = [
    "CheckpointError",
    "ConfigError",
    "LayerStream",
    "ModelConfig",
    "ShardingRules",
    "Skeleton",
    "TextModel",
    "Trace",
    "TraceError",
    "__version__",
    "audit",
    "compare",
    "convert",
    "device_budget",
    "explain",
    "export",
    "generate",
    "load",
    "load_config",
    "make_tiny",
    "parameter_budget",
    "save",
    "state_budget",
    "stream_layers",
    "trace",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
