"""Runs made from recurrences, with no model behind them: what the rules, the store and the views are tested on."""

import dataclasses
import math

from propcheck.records import EngineInfo, InputInfo, LossInfo, ModelInfo, NormRecord, ParameterRecord, Run, SiteRecord
from propcheck.rules import judge

WIDTH = 5120


def broken_rules(run, **options):
    return [finding.rule for finding in judge(run, **options)]


def only_finding(run, rule):
    (finding,) = judge(run, select=[rule])
    return finding


def run_of(sites, parameters=(), *, seeds=(0,), loss=7.0, placement="pre", **changes):
    sites = tuple(sites)
    fields = {
        "path": None,
        "target": "synthetic",
        "model": ModelInfo(
            class_name="Synthetic",
            parameters=1000,
            blocks=len({s.block for s in sites} - {None}),
            sites=len({s.site for s in sites}),
            width=WIDTH,
            placement=placement,
        ),
        "precision": "bf16",
        "inputs": InputInfo(batch=1, tokens=256, source="zipf"),
        "seeds": seeds,
        "engine": EngineInfo(
            mode="streamed", wall_seconds=12.5, peak_rss_bytes=3 * 2**30, threads=2, device="cpu", memory_budget_bytes=5 * 2**30
        ),
        "versions": {"propcheck": "0.1.0", "torch": "2.13.0"},
        "loss": LossInfo(value=loss, uniform=math.log(1000)),
        "config_hash": "abc123",
        "command": "propcheck scan synthetic",
        "sites": sites,
        "parameters": tuple(parameters),
    }
    return Run(**{**fields, **changes})


def site(number, block, sublayer="mlp", *, stream=1.0, update=0.1, total=None, seed=0, placement="pre", **changes):
    """One site whose update is uncorrelated with the stream unless ``total`` says otherwise."""
    total = math.sqrt(stream**2 + update**2) if total is None else total
    fields = {
        "stream_dtype": "bfloat16",
        "update_dtype": "bfloat16",
        "stream_norm": stream * WIDTH**0.5,
        "update_norm": update * WIDTH**0.5,
        "sum_norm": total * WIDTH**0.5,
        "stream_rms": stream,
        "update_rms": update,
        "sum_rms": total,
        "sum_absmax": 5 * total,
        "update_ratio": update / stream if stream else math.inf,
        "cosine": 0.0,
        "add_error": 0.001,
        "swallowed": 0.001,
        "nonfinite": 0,
        "param_grad_norm": 0.1,
    }
    return SiteRecord(
        seed=seed,
        site=number,
        block=block,
        sublayer=sublayer,
        module=f"blocks.{block}.{sublayer}",
        placement=placement,
        **{**fields, **changes},
    )


def additive(
    blocks, *, embedding=1.0, updates=(0.3, 1.0), gains=(1.0, 2.04), kinds=("attention", "mlp"), last_gradient=1e-3, seed=0
):
    """Pre-norm: S grows by f at each addition, g_k^2 = g_{k+1}^2 (1 + b/S) with b = gain * f."""
    stream, records = embedding, []
    for number in range(2 * blocks):
        update = updates[number % 2]
        records.append(site(number, number // 2, kinds[number % 2], stream=stream, update=update, seed=seed))
        stream = records[-1].sum_rms
    gradient = last_gradient
    for number in reversed(range(2 * blocks)):
        before = gradient * math.sqrt(1 + gains[number % 2] * records[number].update_ratio ** 2)
        records[number] = with_gradient(records[number], before, gradient)
        gradient = before
    return records


def with_gradient(record, before, after):
    return dataclasses.replace(record, grad_stream_norm=before, grad_sum_norm=after, grad_update_norm=after)


def factors(blocks, *, forward=1.0, backward=1.0, start=1.0, placement="pre", noise=lambda: 1.0, seed=0):
    """Each block multiplies stream and gradient by a constant, half of it (geometrically) at each of its two additions."""
    step, stream, records = math.sqrt(forward), start, []
    for number in range(2 * blocks):
        total = stream * step * noise()
        kind = ("attention", "mlp")[number % 2]
        records.append(site(number, number // 2, kind, stream=stream, total=total, placement=placement, seed=seed))
        stream = total
    gradient = 1.0
    for number in reversed(range(2 * blocks)):
        before = gradient * math.sqrt(backward) * noise()
        records[number] = with_gradient(records[number], before, gradient)
        gradient = before
    return records


def post_norm(blocks, *, embedding=1.0, update=1.0, seed=0):
    """Post-norm: every sublayer reads RMS 1, every sum is sqrt(1 + update^2), the gradient is flat."""
    records = []
    for number in range(2 * blocks):
        kind = ("attention", "mlp")[number % 2]
        stream = embedding if number == 0 else 1.0
        records.append(site(number, number // 2, kind, stream=stream, update=update, placement="post", seed=seed))
        records[-1] = with_gradient(records[-1], 0.01, 0.01 / records[-1].sum_rms)
    return records


def qwen(*, seed=0):
    """Like Qwen3.8-27B at its published initialisation: 48 Gated DeltaNet and 16 attention mixers, bf16.

    Embedding 0.02, mlp updates 3.42, DeltaNet 0.19, attention 0.35; b/f 2.04 for the mlp and 5 for the DeltaNet.
    """
    stream, records = 0.02, []
    for number in range(128):
        block = number // 2
        kind = "mlp" if number % 2 else "attention" if block % 4 == 3 else "linear_attention"
        update = {"mlp": 3.42, "attention": 0.35, "linear_attention": 0.19}[kind]
        ratio = update / stream
        # Measured share of elements lost in a bf16 addition, by update / stream.
        lost = min(0.9, 0.26 * (0.0065 / ratio) ** 0.85)
        records.append(
            site(number, block, kind, stream=stream, update=update, seed=seed, swallowed=lost, add_error=lost, cosine=0.001)
        )
        stream = records[-1].sum_rms
    gradient = 0.0033
    for number in reversed(range(128)):
        gain = {"mlp": 2.04, "attention": 1.5, "linear_attention": 5.0}[records[number].sublayer]
        before = gradient * math.sqrt(1 + gain * records[number].update_ratio ** 2)
        records[number] = with_gradient(records[number], before, gradient)
        gradient = before
    return records


def parameter(name, **changes):
    fields = {
        "role": "weight",
        "block": None,
        "sublayer": None,
        "kind": "parameter",
        "shape": (4, 3),
        "dtype": "bfloat16",
        "numel": 12,
        "init_calls": "normal_(std=0.02)",
        "mean": 0.0,
        "std": 0.02,
        "absmax": 0.05,
        "zeros": 0,
        "nonfinite": 0,
        "duplicate_rows": 0,
        "requires_grad": True,
        "grad_state": "norm",
        "grad_norm": 0.1,
    }
    return ParameterRecord(name=name, **{**fields, **changes})


def norm(at, name="input_norm", *, place="read", gain=1.0, seed=0, number=None, **changes):
    """The norm of the attention of a block (site 2 * block), unless ``changes`` say otherwise."""
    module = f"blocks.{at}.{name}"
    fields = {
        "site": 2 * at,
        "block": at,
        "kind": "mean_square",
        "dtype": "float32",
        "width": 5120,
        "eps": 1e-6,
        "input_rms": 1.0,
        "input_absmax": 4.0,
        "output_rms": gain,
        "epsilon_share": 0.0,
        "zero_share": 0.0,
        "parameter": f"{module}.weight",
        **changes,
    }
    number = 2 * at if number is None else number
    return NormRecord(seed=seed, norm=number, place=place, module=module, gain=gain, **fields)


WEIGHT = {
    "role": "linear",
    "sublayer": "mlp",
    "shape": (64, 32),
    "numel": 2048,
    "init_calls": "normal_(0, 0.02)",
    "absmax": 0.08,
}


def weight(at, name="mlp.up.weight", **changes):
    """The record of a linear weight of one block, drawn with std 0.02."""
    return parameter(f"blocks.{at}.{name}", **{**WEIGHT, "block": at, **changes})


def judging(*rules, blocks=4):
    """Return a function that judges a run of some parameters and norms by ``rules`` alone."""

    def judged(*parameters, sites=None, norms=(), loss=None, **changes):
        run = run_of(additive(blocks) if sites is None else sites, parameters, norms=tuple(norms), **changes)
        return judge(run if loss is None else dataclasses.replace(run, loss=loss), select=rules)

    return judged
