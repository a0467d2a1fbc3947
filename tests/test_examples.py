"""What the examples and the README show is what the tool says."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import rich.console

import propcheck
from propcheck.analysis.growth import stream_growth
from propcheck.analysis.profile import profile
from propcheck.cli import app as cli
from propcheck.comparison.compare import compare
from propcheck.config.tolerances import Tolerances
from propcheck.records.store import read_run
from propcheck.render.terminal.comparison_table import print_comparison
from propcheck.render.terminal.run_table import print_run

ROOT = Path(__file__).parents[1]


def rendered(directory):
    console = rich.console.Console(file=io.StringIO(), width=80)
    print_run(read_run(directory), console)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


# Post-norm needs no final norm: 5120 gains fewer.
@pytest.mark.parametrize(("name", "parameters"), [("qwen3.8-27b", 26_895_998_464), ("qwen3.8-27b-postnorm", 26_895_993_344)])
def test_the_example_runs_are_whole_full_size_and_made_by_the_command_beside_them(name, parameters):
    run = read_run(ROOT / "reports" / name)
    assert run.model.parameters == parameters
    assert run.model.sites == len(run.sites) == 128
    assert f"| `{run.command}` |" in (ROOT / "reports" / "README.md").read_text()
    assert run.engine.peak_rss_bytes <= 5 * 2**30
    assert sum(path.stat().st_size for path in (ROOT / "reports" / name).iterdir()) < 1_000_000


@pytest.mark.parametrize("name", ["qwen3.8-27b", "qwen3.8-27b-postnorm"])
def test_the_page_of_the_model_shows_lines_of_the_example_runs(name):
    text = (ROOT / "docs" / "qwen3.8-27b.md").read_text()
    (shown,) = re.findall(rf"<!-- from: propcheck scan {re.escape(name)} --memory 5GiB -->\n```\n(.*?)```", text, re.DOTALL)
    lines = rendered(ROOT / "reports" / name)
    missing = [line for line in shown.splitlines() if line.strip() not in ("", "...") and line not in lines]
    assert not missing


def test_the_page_of_compare_shows_the_two_example_runs_side_by_side():
    text = (ROOT / "docs" / "compare.md").read_text()
    (shown,) = re.findall(r"<!-- from: propcheck compare [^\n]*-->\n```\n(.*?)```", text, re.DOTALL)
    runs = [read_run(ROOT / "reports" / name) for name in ("qwen3.8-27b", "qwen3.8-27b-postnorm")]
    console = rich.console.Console(file=io.StringIO(), width=80)
    print_comparison(compare(runs, Tolerances()), console)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert shown.splitlines() == [line for line in lines if not line.startswith(("A: reports", "B: reports"))]


def test_the_example_run_has_the_numbers_of_an_independent_measurement():
    # Measured for this model, at this init and size, by code other than this: stream RMS within 2 %, MLP updates 3.42 and
    # DeltaNet updates .17-.20 within 10 %, gradients of the stream within 15 %.
    sites = read_run(ROOT / "reports" / "qwen3.8-27b").sites
    after = {block: next(s.sum_rms for s in reversed(sites) if s.block == block) for block in (0, 1, 7, 15, 31, 63)}
    assert sites[0].stream_rms == pytest.approx(0.0200, rel=0.02)
    assert list(after.values()) == pytest.approx([3.425, 4.84, 9.70, 13.72, 19.42, 27.44], rel=0.02)
    by_kind = {}
    for site in sites:
        by_kind.setdefault(site.sublayer, []).append(site.update_rms)
    assert {kind: len(values) for kind, values in by_kind.items()} == {"linear_attention": 48, "attention": 16, "mlp": 64}
    assert by_kind["mlp"] == pytest.approx([3.42] * 64, rel=0.1)
    assert all(0.9 * 0.17 <= value <= 1.1 * 0.20 for value in by_kind["linear_attention"])
    gradients = {s.block: s.grad_stream_norm for s in reversed(sites)}
    assert gradients[0] == pytest.approx(90, rel=0.15)
    assert gradients[63] == pytest.approx(0.00333, rel=0.15)
    assert sum(site.nonfinite for site in sites) == 0


def test_the_post_norm_twin_follows_the_backward_law():
    # A norm after each addition: g_k^2 = g_{k+1}^2 (1 + b) / (1 + f), with f = update_ratio^2 and b / f = 2.07 for SwiGLU
    # (computed for pre-activations of std 0.2 to 2); see propcheck.analysis.theory. The mixers' share is small.
    sites = read_run(ROOT / "reports" / "qwen3.8-27b-postnorm").sites
    ffn = [s for s in sites if s.sublayer == "mlp" and s.block is not None and s.block > 0]
    law = [((1 + 2.07 * s.update_ratio**2) / (1 + s.update_ratio**2)) ** 0.5 for s in ffn]
    # The gradient behind the norm is that of the next block's stream.
    entry = {s.block: s.grad_stream_norm for s in reversed(sites)}
    measured = [s.grad_stream_norm / entry[s.block + 1] for s in ffn[:-1]]
    assert measured == pytest.approx(law[:-1], rel=0.1)


def test_the_readme_is_short_and_its_fault_is_the_only_one(tmp_path):
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110
    run = propcheck.scan(f"{ROOT}/examples/double_residual.py:build", args={"fixed": True})
    assert not run.findings


def test_the_walk_through_opens_a_run(tmp_path):
    settings = ["model.layers=4", "model.width=32", "model.vocabulary=64", "inputs.tokens=8"]
    options = [*(f"--set={setting}" for setting in settings), "--out", str(tmp_path), "--no-plots", "-q"]
    assert cli.run(["scan", "tiny", *options]) in (0, 1)
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "read_run.py", tmp_path], check=True, capture_output=True, text=True
    )
    assert "linear_attention" in done.stdout
    assert "normal_(0, " in done.stdout


def blocks_shown():
    pages = ("README.md", "examples/README.md")
    pattern = r"<!-- from: propcheck (.*?) -->\n```\n(.*?)```"
    return [(page, *block) for page in pages for block in re.findall(pattern, (ROOT / page).read_text(), re.DOTALL)]


def words(line):
    """A line as its words, with the numbers among them to the digits that do not depend on the processor."""
    return [pytest.approx(float(word), rel=0.03) if re.fullmatch(r"\d[\d.]*", word) else word for word in line.split()]


@pytest.mark.parametrize(("page", "command", "shown"), blocks_shown(), ids=[block[1] for block in blocks_shown()])
def test_the_pages_show_what_their_commands_print(page, command, shown, tmp_path):
    assert f"```sh\npropcheck {command}\n```" in (ROOT / page).read_text()
    arguments = [*command.split(), "--no-plots", "-q", "--out", str(tmp_path)]
    environment = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-m", "propcheck", *arguments], cwd=ROOT, check=False, capture_output=True, text=True, env=environment
    )
    assert (done.stderr, done.returncode) == ("", int("\nerror PC" in shown))
    printed = [line.split() for line in done.stdout.splitlines()]
    for line in shown.splitlines():
        if line.strip() not in ("", "..."):
            assert any(len(words(line)) == len(one) and matches(words(line), one) for one in printed), line


def matches(expected, printed):
    return all(
        want == (found if isinstance(want, str) else number(found)) for want, found in zip(expected, printed, strict=True)
    )


def number(text):
    try:
        return float(text)
    except ValueError:
        return float("nan")


def test_the_walk_through_in_python_runs(tmp_path):
    text = (ROOT / "examples" / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "examples")))}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True, env=environment
    )
    assert "GPT, " in done.stdout
    assert (tmp_path / "reports" / "mine" / "sublayers.parquet").exists()


def test_the_stock_model_gets_its_four_statements_and_nothing_false():
    """What is true of this init: a discontinuity at the embedding, an eps that decides, lost updates, healthy growth."""
    run = read_run(ROOT / "reports" / "qwen3.8-27b")
    found = {finding.rule: finding for finding in run.findings}
    # PC104 is about dt_bias = 1: softplus(1) = 1.31, beyond the range that Mamba draws from.
    assert {rule: finding.severity for rule, finding in found.items()} == {
        "PC104": "note", "PC205": "warning", "PC207": "note", "PC208": "warning",
    }  # fmt: skip
    assert len(run.findings) == 5  # PC207 of the DeltaNet and of late attention
    assert all(finding.source for finding in run.findings)

    start = found["PC205"]  # the first block makes .0200 into 3.43, x171, and its gradient is about 25,000 times the last one's
    assert (start.site.block, start.value) == (0, pytest.approx(171, rel=0.02))
    assert run.sites[0].update_ratio == pytest.approx(9, rel=0.1)
    assert run.sites[1].update_ratio == pytest.approx(19, rel=0.1)
    assert run.sites[0].grad_stream_norm / run.sites[126].grad_stream_norm == pytest.approx(26000, rel=0.2)

    core = [norm for norm in run.norms if norm.place == "inside" and norm.kind == "mean_square" and norm.width == 128]
    assert len(core) == 48  # the gated norm of each DeltaNet: input 1.4e-4 under the root of eps, 1e-3; output .12, not 1
    assert [norm.input_rms for norm in core] == pytest.approx([1.4e-4] * 48, rel=0.15)
    assert [norm.output_rms for norm in core] == pytest.approx([0.12] * 48, rel=0.15)
    assert {(norm.eps, norm.epsilon_share) for norm in core} == {(1e-6, 1.0)}
    assert "conv" in found["PC208"].message  # the cause: drawn with std .02, where torch's default is .29
    assert "0.289" in found["PC208"].message

    # Late DeltaNet updates are .7 % of the stream: about a quarter of their elements is lost.
    (late,) = (f for f in run.findings if f.rule == "PC207" and f.site.sublayer == "linear_attention")
    assert late.value == pytest.approx(0.26, rel=0.1)

    growth = stream_growth(profile(run))  # which is healthy, and no finding
    assert (growth.law, growth.exponent) == ("power", pytest.approx(0.5, abs=0.02))
