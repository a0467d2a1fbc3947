"""Every causal language model that transformers ships, small, from its config alone: its sites, and what is said of them."""

import math

import pytest
from causal_lm_sites import SITES
from small import CANNOT, CANNOT_BF16, small_config, whole_config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import propcheck

RUNS = [(kind, precision) for kind in sorted(SITES) if kind not in CANNOT for precision in ("fp32", "bf16")]
# Sites without gradients: what runs under no_grad (the early cycles of hrm_text, the patcher of blt).
PARTLY_WITHOUT_GRADIENTS = {"hrm_text", "blt"}
# Reversible layers run in an autograd.Function of their own, whose forward has no graph.
WITHOUT_GRADIENTS = {"reformer"}


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    known = {}

    def scan(kind, precision):
        if (kind, precision) not in known:
            folder = tmp_path_factory.mktemp(kind)
            whole_config(kind).save_pretrained(folder)
            known[kind, precision] = propcheck.scan(str(folder), precision=precision, batch=2, tokens=16, memory="8GiB")
        return known[kind, precision]

    return scan


def test_the_table_covers_every_type():
    assert SITES.keys() == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    assert not set(CANNOT_BF16) - set(CANNOT)
    print(f"\n{len(SITES) - len(CANNOT)} of {len(SITES)} causal-LM types scanned in fp32 and bf16; not: {CANNOT}")


@pytest.mark.parametrize(("kind", "precision"), RUNS)
def test_every_residual_addition_is_found_and_measured(kind, precision, scans):
    run = scans(kind, precision)
    rows = run.record.sites
    assert len(rows) == SITES[kind](small_config(kind))
    assert [row.site for row in rows] == list(range(len(rows)))
    for row in rows:
        assert row.sum_rms > 0
        assert math.isfinite(row.sum_rms)
        assert row.update_rms is not None
        assert row.module is not None
        assert row.placement is not None
    graded = [row for row in rows if row.grad_sum_norm is not None]
    if kind in WITHOUT_GRADIENTS:
        assert not graded
    elif kind in PARTLY_WITHOUT_GRADIENTS:
        assert 0 < len(graded) < len(rows)
    else:
        assert len(graded) == len(rows)
    assert all(math.isfinite(row.grad_sum_norm) for row in graded)
    assert math.isfinite(run.loss.value)
    assert run.loss.uniform == pytest.approx(math.log(small_config(kind).vocab_size))
    # What cannot be followed would be said.
    assert not {finding.rule for finding in run.findings} & {"PC101", "PC102", "PC502", "PC503"}


# What the sublayers of a layer compute, by reading their code; in the order in which they are first met.
KINDS = {
    "llama": ["attention", "mlp"],
    "gpt2": ["attention", "mlp"],
    "bert": ["attention", "mlp"],
    "reformer": ["attention", "mlp"],
    "cohere": ["attention", "mlp"],
    "gpt_neox": ["mlp", "attention"],
    "mixtral": ["attention", "moe"],
    "gpt_oss": ["attention", "moe"],
    "deepseek_v3": ["attention", "mlp", "moe"],
    "deepseek_v4": ["attention", "mlp", "moe"],
    "mamba": ["ssm"],
    "mamba2": ["ssm"],
    "jamba": ["ssm", "mlp", "moe", "attention"],
    "falcon_h1": ["ssm", "attention", "mlp"],
    "nemotron_h": ["ssm", "moe", "attention", "mlp"],
    "qwen3_next": ["linear_attention", "moe", "attention"],
    "kimi_linear": ["linear_attention", "mlp", "moe", "attention"],
    "minimax": ["attention", "moe", "linear_attention"],
    "rwkv": ["ssm", "mlp"],
    "recurrent_gemma": ["ssm", "mlp", "attention"],
    "xlstm": ["linear_attention", "mlp"],
}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_kind_of_a_sublayer_is_what_it_computes(kind, scans):
    assert list(dict.fromkeys(row.sublayer for row in scans(kind, "fp32").record.sites)) == KINDS[kind]
