"""The table: complete numbers at any width, and a summary whose figures can be checked by hand."""

import dataclasses
import io
import math

import pytest
from rich.console import Console
from synthetic import additive, factors, parameter, post_norm, qwen, run_of

from propcheck import rules
from propcheck.formatting import count, number, places
from propcheck.records import LossInfo
from propcheck.render.summary import summary_lines
from propcheck.render.terminal.run_table import print_columns, print_run
from propcheck.render.terminal.table_columns import TableColumn


def text_of(run, width=80, detail="block", **options):
    stream = io.StringIO()
    print_run(run, Console(file=stream, width=width, **options), detail=detail)
    return stream.getvalue()


def judged(run):
    return dataclasses.replace(run, findings=rules.judge(run))


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
@pytest.mark.parametrize("detail", ["block", "site"])
def test_no_line_is_wider_than_the_terminal_and_no_number_is_cut(width, detail):
    text = text_of(judged(run_of(qwen(), path="reports/q")), width, detail)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text


def test_eighty_columns_hold_every_column_of_either_detail():
    run = run_of(qwen())
    assert "Columns hidden" not in text_of(run, 80, "block")
    assert "Columns hidden" not in text_of(run, 80, "site")


def test_columns_that_do_not_fit_are_named():
    assert "Columns hidden (terminal too narrow): kinds" in " ".join(text_of(run_of(qwen()), 44).split())
    assert "Columns hidden (terminal too narrow): mixer /stream, ffn /stream." in " ".join(text_of(run_of(qwen()), 56).split())


def test_a_row_a_block_shows_its_own_numbers():
    lines = text_of(run_of(qwen())).splitlines()
    first = next(line for line in lines if line.split()[:1] == ["0"]).split()
    # 0.02 + DeltaNet 0.19 (x9.5), + MLP 3.42 on 0.191 (x17.9).
    assert first[:8] == ["0", "linear+mlp", "0.0200", "0.190", "9.50", "3.42", "17.9", "3.43"]
    assert sum(line.split()[1:2] == ["attn+mlp"] for line in lines) == 16
    assert sum(line.split()[1:2] == ["linear+mlp"] for line in lines) == 48


def test_a_block_with_three_sites_shows_all_three_updates():
    records = [
        dataclasses.replace(r, block=r.site // 3, sublayer=("attention", "attention", "mlp")[r.site % 3]) for r in additive(3)
    ]
    records[1] = dataclasses.replace(records[1], update_rms=0.777)
    assert "0.777" in text_of(run_of(records))


def test_odd_values_are_shown():
    records = additive(2)
    records[0] = dataclasses.replace(
        records[0], stream_rms=math.nan, update_rms=None, update_ratio=math.inf, grad_stream_norm=1.5e-12, block=None
    )
    row = next(line for line in text_of(run_of(records)).splitlines() if "attn" in line).split()
    assert row == ["0", "attn", "NaN", "-", "inf", "1.04", "1.50e-12"]


def test_colours_only_repeat_words():
    text = text_of(judged(run_of(factors(64, forward=1.1))), force_terminal=True, color_system="truecolor")
    assert "\x1b[1;31merror\x1b[0m" in text
    assert "error PC201 explosion" in text_of(judged(run_of(factors(64, forward=1.1))))


def test_the_summary_compounds_to_what_it_says():
    run = judged(run_of(factors(64, forward=1.1, backward=0.9), path="reports/x"))
    lines = summary_lines(run)
    # 1.1^63 = 405 from the end of block 0 to the end of block 63; 0.9^62 = 0.00146 from block 63 back to block 1.
    assert "x1.1 per block, x405 over 63 blocks" in lines[0]
    assert "before block 63" in lines[1]
    assert "before block 1: x0.9 per block backward, x0.00146 over 62 blocks" in lines[1]
    assert "as 1.1^block, an exponential, over blocks 16 to 63; growth exponent 0.0938." in lines[0]  # 63/64 ln 1.1
    assert "as 0.9^block, an exponential, over blocks 17 to 63; growth exponent -0.102." in lines[1]  # 62/64 ln 0.9
    assert "First loss 7.000; a uniform guess gives ln(1000) = 6.908." in lines
    assert "Findings: 2 errors, 0 warnings, 0 notes." in lines
    assert "Files: reports/x" in lines


def test_growth_by_additions_is_put_beside_what_they_give():
    run = run_of(qwen())
    forward, backward = summary_lines(run)[:2]
    assert "as depth^0.50, a power law, over blocks 16 to 63 (equal updates give 0.5); growth exponent 0.0325." in forward
    assert "as depth^-1.01, a power law, over blocks 17 to 63 (equal updates give -0.5, gated branches -1);" in backward


def test_a_norm_on_the_stream_has_no_such_power():
    run = run_of(post_norm(64), placement="post")
    forward, backward = summary_lines(run)[:2]
    assert "x1 over 63 blocks, flat over blocks 16 to 63; growth exponent 0." in forward
    assert "flat over blocks 17 to 63" in backward


def test_seeds_are_shown_as_median_and_spread():
    records = [
        dataclasses.replace(r, sum_rms=r.sum_rms * (1.5 if r.site == 5 and seed == 2 else 1))
        for seed in range(3)
        for r in additive(4, seed=seed)
    ]
    run = run_of(records, seeds=(0, 1, 2))
    text = text_of(run)
    # Site 5 is the last of block 2: between 1 and 1.5 times, a quarter on either side of the middle.
    assert any(cell.endswith("±25%") for line in text.splitlines() if line.split()[:1] == ["2"] for cell in line.split())
    assert "Values are medians over 3 seeds. Largest ratio between two seeds: sum RMS x1.5 (site 5)" in " ".join(text.split())
    assert sum(line.split()[1:2] == ["attn+mlp"] for line in text.splitlines()) == 4


@pytest.mark.parametrize("blocks", [1, 2])
def test_shallow_models_and_empty_runs_print(blocks):
    assert "No findings." in text_of(run_of(additive(blocks)))
    assert "not observed" in text_of(run_of([], loss=None))


@pytest.mark.parametrize(
    ("value", "plain", "aligned"),
    [
        (3.4217, "3.42", "3.42"),
        (0.02, "0.02", "0.0200"),
        (0.0065, "0.0065", "0.00650"),
        (9.999, "10", "10.0"),
        (446.4, "446", "446"),
        (1376.0, "1380", "1380"),
        (65504.0, "65500", "65500"),
        (1e24, "1e24", "1.00e24"),
        (1.5e-5, "1.5e-5", "1.50e-5"),
        (-0.001234, "-0.00123", "-0.00123"),
        (0.0, "0", "0"),
        (None, "-", "-"),
        (math.nan, "NaN", "NaN"),
        (-math.inf, "-inf", "-inf"),
    ],
)
def test_numbers_have_three_significant_digits(value, plain, aligned):
    assert number(value) == plain
    assert number(value, aligned=True) == aligned


def test_plurals():
    assert (count(1, "site"), count(2, "site"), count(3, "branch")) == ("1 site", "2 sites", "3 branches")
    assert (places("block", [4]), places("block", [9, 4])) == ("block 4", "blocks 4 to 9")


def test_two_streams_are_summed_up_one_by_one():
    """An encoder that doubles and a decoder that begins anew at the first size and triples: nothing is said across them."""
    encoder = [
        dataclasses.replace(record, continues=record.site - 1 if record.site else None) for record in factors(8, forward=2.0)
    ]
    more = len(encoder)
    decoder = [
        dataclasses.replace(
            record, site=record.site + more, block=record.block + 8, continues=record.site + more - 1 if record.site else None
        )
        for record in factors(8, forward=3.0)
    ]
    run = run_of([*encoder, *decoder])
    lines = [line for line in summary_lines(run) if line.startswith("Stream RMS")]
    assert [line.partition(": ")[2].partition(",")[0] for line in lines] == ["x2 per block", "x3 per block"]
    assert "after block 7" in lines[0]
    assert "after block 8" in lines[1]


def test_the_head_is_summed_up_with_its_gradients():
    loss = LossInfo(value=7.9, uniform=math.log(1000), logit_std=1.43, logit_absmax=6.5)
    parameters = [
        parameter("embedding.weight", role="embedding", shape=(1000, 8), grad_norm=89.0),
        parameter("head.weight", role="linear", shape=(1000, 8), grad_norm=0.71),
    ]
    run = dataclasses.replace(run_of(additive(2), parameters), loss=loss)
    line = "Logits: std 1.43 over the vocabulary, largest magnitude 6.5. Gradient norm: embedding 89, head 0.71."
    assert line in summary_lines(run)
    tied = dataclasses.replace(run, parameters=(dataclasses.replace(parameters[0], name="embedding.weight = head.weight"),))
    assert any("embedding 89 (tied to the head)" in one for one in summary_lines(tied))
    unseen = dataclasses.replace(run, loss=dataclasses.replace(loss, logit_std=None))
    assert not any(one.startswith("Logits") for one in summary_lines(unseen))


def test_the_losses_of_several_seeds_are_shown_with_their_range():
    run = dataclasses.replace(run_of(additive(2)), loss=LossInfo(13.5, math.log(1000), lowest=13.4, highest=13.61))
    assert any("First loss 13.500 (13.400 to 13.610 over the seeds); a uniform" in one for one in summary_lines(run))


def test_columns_that_go_together_are_dropped_together_but_for_the_last_ones():
    def shown(width):
        columns = [TableColumn("block", ("1",), 9)]
        columns += [
            TableColumn(f"{name} {label}", ("1.00",), keep) for name, keep in (("stream", 5), ("ratio", 3)) for label in "ABC"
        ]
        console = Console(file=io.StringIO(), width=width)
        print_columns(columns, console)
        return console.file.getvalue().splitlines()[0].split()

    assert shown(80) == ["block", "stream", "A", "stream", "B", "stream", "C", "ratio", "A", "ratio", "B", "ratio", "C"]
    assert shown(45) == ["block", "stream", "A", "stream", "B", "stream", "C"]  # not ratio A, though there is room for it
    assert shown(24) == ["block", "stream", "A", "stream", "B"]
