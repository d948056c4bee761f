"""Models whose heads eight devices can share, and scripts that run on so many."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from glm5_jax.checkpoint.tiny import packaged_config


@pytest.fixture(scope="session")
def eight_heads():
    """The config of the tiny model with eight heads, of so many KDA layers and one of DSA."""

    def config(kda_layers):
        config = json.loads(packaged_config("tiny").read_text())
        text, layers = config["text_config"], kda_layers + 1
        text |= {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": layers}
        text["linear_attn_config"] |= {
            "num_heads": 8,
            "kda_layers": [*range(kda_layers)],
            "full_attn_layers": [kda_layers],
        }
        text["layer_types"] = ["linear_attention"] * kda_layers + ["deepseek_sparse_attention"]
        for key in ("mlp_layer_types", "indexer_types"):
            text[key] = text[key][:layers]
        return config

    return config


@pytest.fixture(scope="session")
def run_apart():
    """Run a script of this directory on eight simulated devices: what it prints last, from JSON.

    It has a process of its own: how many devices a CPU stands for is settled when JAX begins.
    """

    def run(script, *arguments, x64=False, **settings):
        settings |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
        settings |= {"JAX_ENABLE_X64": str(int(x64))}
        done = subprocess.run(
            [sys.executable, Path(__file__).with_name(script), *arguments],
            env=os.environ | settings,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run
