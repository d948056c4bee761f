"""A small model, and scripts that run in several processes at once."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from glm5_jax.checkpoint.tiny import make_tiny, packaged_config

TIMEOUT = 400  # of all processes together, also on a busy machine


@dataclass(frozen=True)
class Ended:
    """How a process ended, and when."""

    status: int
    out: str
    err: str
    at: float


@pytest.fixture(scope="session")
def config():
    """The tiny model with a layer of each kind, of heads that eight devices can share.

    They are small: a matrix of them that is quantised has one scale, which no cut goes through.
    """
    config = json.loads(packaged_config("tiny").read_text())
    config["text_config"] |= {
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "qk_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 6,
        "first_k_dense_replace": 0,
        "layer_types": ["linear_attention", "deepseek_sparse_attention"],
        "mlp_layer_types": ["sparse", "sparse"],
        "indexer_types": ["full", "full"],
    }
    linear = {"num_heads": 8, "kda_layers": [0], "full_attn_layers": [1]}
    config["text_config"]["linear_attn_config"] |= linear
    return config


@pytest.fixture(scope="session")
def plain(config, tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("plain") / "model", config, dtype="float32")


@pytest.fixture(scope="session")
def quantized(config, tmp_path_factory):
    path = tmp_path_factory.mktemp("quantized") / "model"
    return make_tiny(path, config, quantization="fp8")


@pytest.fixture(scope="session")
def run_together(tmp_path_factory):
    """Run a script in one process, or in several at once, each with so many CPU devices.

    Several find each other by options behind the arguments, those of the commands.
    """

    def run(script, *arguments, processes=1, devices=1):
        port, logs = _free_port(), tmp_path_factory.mktemp("logs")
        command = [sys.executable, Path(__file__).with_name(script), *arguments]
        settings = {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
            "JAX_ENABLE_X64": "1",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # of compilation, which is most of the time
        }
        started = []
        for i in range(processes):
            join = ["--coordinator", f"127.0.0.1:{port}", "--process", f"{i}/{processes}"]
            with (logs / f"{i}.out").open("w") as out, (logs / f"{i}.err").open("w") as err:
                one = subprocess.Popen(
                    [*command, *(join if processes > 1 else ())],
                    env=os.environ | settings,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
            started.append(one)
        try:
            ends = _wait(started)
        finally:
            for one in started:
                if one.poll() is None:
                    os.killpg(one.pid, signal.SIGKILL)
                    one.wait()
        return [
            Ended(one.returncode, *((logs / f"{i}.{of}").read_text() for of in ("out", "err")), at)
            for i, (one, at) in enumerate(zip(started, ends, strict=True))
        ]

    return run


def _wait(started):
    """When each process ended."""
    ends, deadline = {}, time.monotonic() + TIMEOUT
    while len(ends) < len(started):
        for one in started:
            if one.pid not in ends and one.poll() is not None:
                ends[one.pid] = time.monotonic()
        assert time.monotonic() < deadline, f"{len(ends)} of {len(started)} processes have ended"
        time.sleep(0.05)
    return [ends[one.pid] for one in started]


def _free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
