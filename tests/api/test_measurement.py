"""A whole scan, from a probe to a run."""

import dataclasses
import math
import subprocess
import sys
import weakref

import pytest

from propcheck.api.assemble import _spread
from propcheck.api.measurement import measure
from propcheck.api.requests import ScanRequest
from propcheck.config.probe import Probe
from propcheck.execution.passes import execute

SMALL = {"layers": 3, "width": 32, "vocabulary": 50, "mixers": ["deltanet", "attention"], "deltanet": {"chunk": 8}}


def probe(**sections):
    return Probe.model_validate({"name": "p", "model": SMALL, "inputs": {"tokens": 12}, **sections})


def scan(probe, **options):
    return measure(ScanRequest("p", probe, **options))


def test_a_run_says_what_was_scanned():
    run = scan(probe(scan={"seeds": (3, 4)}), command="propcheck scan p")
    assert (run.model.blocks, run.model.sites, run.model.width, run.model.placement) == (3, 6, 32, "pre")
    assert [(row.seed, row.site, row.block) for row in run.sites] == [(s, i, i // 2) for s in (3, 4) for i in range(6)]
    assert [row.sublayer for row in run.sites[:6]] == ["linear_attention", "mlp", "attention", "mlp", "linear_attention", "mlp"]
    assert run.loss.uniform == pytest.approx(math.log(50))
    assert run.model.parameters == sum(p.numel for p in run.parameters if p.kind == "parameter")
    assert all(p.grad_state == "norm" for p in run.parameters)
    assert run.sites[0].stream_rms != run.sites[6].stream_rms  # each seed draws its own weights


def test_the_spread_of_a_gradient_is_that_of_its_logarithm_over_the_seeds():
    # The logarithms of 1, e and e^2 are 0, 1 and 2: a variance of (1 + 0 + 1) / 2 about their mean.
    assert _spread([1.0, math.e, math.e**2]) == pytest.approx(1)
    assert _spread([3.0]) is None
    assert [_spread([3.0, 2.0, other]) for other in (0.0, None, math.inf, math.nan)] == [None] * 4
    several = scan(probe(scan={"seeds": (3, 4, 5)})).parameters
    alone = [scan(probe(scan={"seeds": (seed,)})).parameters for seed in (3, 4, 5)]
    for found, *each in zip(several, *alone, strict=True):
        logs = [math.log(one.grad_norm) for one in each]
        mean = sum(logs) / 3
        assert found.grad_spread == pytest.approx((sum((x - mean) ** 2 for x in logs) / 2) ** 0.5, rel=1e-6)
    assert all(one.grad_spread > 0 for one in several)
    assert all(one.grad_spread is None for one in alone[0])


def test_the_model_of_a_seed_is_gone_before_the_next_is_built(monkeypatch):
    alive, kept = [], []

    def watched(task, *args, **options):
        alive.append([model() for model in kept if model() is not None])

        def build():
            target = task.build()
            kept.append(weakref.ref(target.model))
            target.model.itself = (target.model,)  # a cycle, as hooks and closures make them
            return target

        return execute(dataclasses.replace(task, build=build), *args, **options)

    monkeypatch.setattr("propcheck.api.measurement.execute", watched)
    monkeypatch.setattr("propcheck.api.measurement._WORTH_COLLECTING", 1)
    for _ in range(2):
        scan(probe(scan={"seeds": (0, 1)}))
    assert alive == [[], [], [], []]
    assert len(kept) >= 4


def test_placements_share_every_weight_of_the_same_name():
    runs = [scan(probe(residual={"placement": placement})) for placement in ("pre", "post")]
    facts = [{p.name: (p.shape, p.mean, p.std, p.absmax) for p in run.parameters} for run in runs]
    shared = facts[0].keys() & facts[1].keys()
    assert len(shared) >= len(facts[1]) - 1  # the final norm alone is one's own
    assert all(facts[0][name] == facts[1][name] for name in shared)


def test_a_budget_that_was_not_kept_is_said_to_be_broken(tmp_path):
    # In a process of its own, whose peak is that of the scan.
    options = [*(f"--set=model.{key}={value}" for key, value in (("layers", 1), ("width", 32), ("vocabulary", 50)))]
    command = [sys.executable, "-m", "propcheck", "scan", "tiny", *options, "--out", tmp_path, "--no-plots", "--memory"]
    small, large = (subprocess.run([*command, m], check=False, capture_output=True, text=True) for m in ("1MiB", "20GiB"))
    assert "above the budget of 0.000977 GiB" in " ".join(small.stdout.split())
    assert "above the budget" not in large.stdout


def test_progress_covers_the_work_and_ends():
    class Listener:
        def __init__(self):
            self.total, self.seen, self.stopped = 0.0, [], 0

        def start(self, total):
            self.total = total

        def update(self, phase, block, blocks, done):
            self.seen.append((phase, block, blocks, done))

        def stop(self):
            self.stopped += 1

    listener = Listener()
    scan(probe(scan={"seeds": (0, 1)}), progress=listener)
    assert listener.total == 2
    assert listener.stopped == 1
    done = [one[3] for one in listener.seen]
    assert done == sorted(done)
    assert 1.5 < done[-1] <= 2
    blocks = [(phase, block) for phase, block, _, _ in listener.seen if block is not None]
    once = [("forward", 0), ("forward", 1), ("forward", 2), ("backward", 2), ("backward", 1), ("backward", 0)]
    assert blocks == once * 2


def test_a_shadow_fills_its_columns_for_every_seed_and_progress_covers_it():
    done = []

    class Listener:
        def start(self, total):
            assert total == 2

        def update(self, _phase, _block, _blocks, now):
            done.append(now)

        def stop(self):
            pass

    settings = {"seeds": (0, 1), "shadow": "fp32"}
    run = scan(probe(scan=settings, precision={"preset": "bf16"}), progress=Listener())
    # Rounding to bf16 takes up to 2^-9 = 0.002 of a number.
    assert all(0.0005 < row.shadow_stream_error < 0.02 if row.site else row.shadow_stream_error == 0 for row in run.sites)
    assert all(0.001 < row.shadow_update_error < 0.05 for row in run.sites)
    assert all(0.001 < row.shadow_grad_stream_error < 0.05 for row in run.sites)
    assert all(0.001 < row.shadow_grad_update_error < 0.05 for row in run.sites)
    assert run.sites[0].shadow_update_error != run.sites[6].shadow_update_error
    assert done == sorted(done)
    assert 1.5 < done[-1] <= 2
    plain = scan(probe(scan={"seeds": (0, 1)}, precision={"preset": "bf16"}))
    assert [(row.sum_rms, row.grad_stream_norm) for row in plain.sites] == [
        (row.sum_rms, row.grad_stream_norm) for row in run.sites
    ]
    assert all(row.shadow_stream_error is None for row in plain.sites)


def test_a_run_says_what_made_each_seed_not_finite():
    # 65504 is the largest number of float16.
    run = scan(probe(init={"std": 3e3}, precision={"preset": "fp16"}, scan={"seeds": (0, 1)}))
    assert [(one.seed, one.direction, one.value, one.block) for one in run.origins] == [
        (0, "forward", "infinity", 0),
        (1, "forward", "infinity", 0),
    ]
    assert all(one.module.startswith("blocks.0.mixer") and "float16 numbers" in one.inputs for one in run.origins)


def test_fp16_gradients_are_those_of_a_scaled_loss():
    # Without scaling, the small elements of the gradient fall below the least fp16 number, 6e-8, and become 0.
    wide = {**SMALL, "vocabulary": 2000, "width": 64}
    runs = [scan(probe(model=wide, inputs={"tokens": 64}, precision={"preset": p})) for p in ("fp32", "fp16")]
    fp32, fp16 = ([row.grad_stream_norm for row in run.sites] for run in runs)
    assert fp16 == pytest.approx(fp32, rel=0.05)
    fp32, fp16 = ([p.grad_norm for p in run.parameters] for run in runs)
    assert fp16 == pytest.approx(fp32, rel=0.1)
