"""The real geometry in six layouts: true headers, data that are holes."""

import functools
import subprocess
import sys
from pathlib import Path

import pytest

from glm5_jax.checkpoint.audit import audit

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = {
    # layout: naming, quantization, has an MTP layer, widened
    "bf16": ("released", "none", True, 0),
    "fp8": ("released", "fp8", True, 0),
    "nvfp4_modelopt": ("released", "nvfp4_modelopt", True, 0),
    "nvfp4_compressed_tensors": ("released", "nvfp4_compressed_tensors", True, 0),
    "hf_saved": ("released", "none", False, 34 * 3 + 42),
    "hf_native": ("native", "none", False, 34 + 42),
}


@pytest.fixture(scope="module")
def full_report(full_size):
    """Layout → its report, made once."""
    return functools.cache(lambda layout: audit(full_size(layout)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tensor_of_the_real_model_is_accounted_for(full_report, facts, layout):
    report = full_report(layout)
    naming, quantization, mtp, widened = LAYOUTS[layout]
    assert (report.missing, report.unexpected, report.wrong) == ([], [], [])
    assert report.complete and report.contradictions == []
    assert (report.naming, report.quantization, report.mtp) == (naming, quantization, mtp)
    assert (report.total, report.bytes) == facts.totals(layout)
    for part in ("text", "mtp", "vision"):
        assert report.counts[part] == facts.totals(layout, part)[0]
    assert sum(report.by_role.values()) == report.total
    assert sum(report.bytes_by_role.values()) == report.bytes
    assert sum(report.parameters_by_role.values()) == report.parameters
    assert report.parameters_by_part == {
        "text": 313_326_811_966,
        "mtp": 7_432_592_416 if mtp else 0,
        "vision": 563_627_008,
    }
    assert len(report.widened) == widened
    assert [len(names) for names in report.ignored.values()] == [347]
    absent = "MTP layer 45 is not in the checkpoint"
    assert [notice.partition(",")[0] for notice in report.notices] == ([] if mtp else [absent])


def test_totals_are_the_published_ones(full_report):
    totals = {layout: full_report(layout).total for layout in LAYOUTS}
    assert totals == {
        **{"bf16": 38_770, "fp8": 76_108, "hf_saved": 37_881, "hf_native": 1_609},
        **dict.fromkeys(("nvfp4_modelopt", "nvfp4_compressed_tensors"), 113_074),
    }
    assert full_report("bf16").parameters == 321_323_031_390


def test_roles_of_the_bf16_release(full_report):
    assert full_report("bf16").by_role == {
        **{"embedding": 1, "lm_head": 1, "final_norm": 1},
        **{"kda_projection": 306, "kda_conv": 102, "kda_decay": 68, "kda_norm": 34},
        **{"mla_projection": 60, "mla_norm": 24, "indexer": 60, "indexer_norm": 24},
        **{"moe_router": 86, "moe_expert": 37_152, "moe_shared": 129, "dense_ffn": 9},
        **{"layer_norm": 92, "hyper_connection": 270, "mtp_projection": 1, "mtp_norm": 3},
        "vision": 347,
    }


def test_a_scale_counts_under_the_role_of_its_weight(full_report):
    plain = full_report("bf16").by_role
    fp8 = full_report("fp8").by_role
    nvfp4 = full_report("nvfp4_modelopt").by_role
    doubled = {"moe_expert", "moe_shared", "dense_ffn"}
    assert fp8 == {
        role: count * (2 if role in doubled else 1) + (48 if role == "mla_projection" else 0)
        for role, count in plain.items()
    }
    assert nvfp4 == plain | {"moe_expert": 3 * plain["moe_expert"]}


def test_113_074_headers_fit_in_400_megabytes(full_size):
    # Not ru_maxrss: a child that was just forked has its parent's, and keeps it as its peak.
    code = (
        "import sys; from glm5_jax.checkpoint.audit import audit;"
        "report = audit(sys.argv[1]); status = open('/proc/self/status').read();"
        "print(report.total, status.split('VmHWM:')[1].split()[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(full_size("nvfp4_modelopt"))],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    total, kilobytes = map(int, done.stdout.split())
    assert total == 113_074
    assert kilobytes < 400_000
