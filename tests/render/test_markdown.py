"""Markdown, read back by a parser of CommonMark with GitHub's tables."""

import dataclasses
import itertools

import pytest
from hostile import FINDINGS, HOSTILE, finding
from markdown_it import MarkdownIt
from synthetic import additive, factors, qwen, run_of

from propcheck import rules
from propcheck.records import Place
from propcheck.render import markdown
from propcheck.render.markdown import bullets, elided, escape, scan_markdown, table

READER = MarkdownIt("commonmark").enable(["table", "strikethrough"])


def text_of(tokens):
    """What a reader sees of inline tokens; of HTML there may be a line break alone."""
    assert {one.content for one in tokens if one.type == "html_inline"} <= {"<br>"}
    return "".join("\n" if one.type in ("softbreak", "hardbreak") else one.content for one in tokens)


def blocks(source, kind):
    """The inline texts that stand in blocks of a kind: "th", "td", "paragraph", "h3"."""
    tokens = READER.parse(source)
    return [
        text_of(after.children)
        for before, after in itertools.pairwise(tokens)
        if after.type == "inline" and before.tag == kind and before.nesting == 1
    ]


def judged(run):
    return dataclasses.replace(run, findings=rules.judge(run))


TEXTS = [
    "a | b || c",
    "a\nb\r\n\nc",
    "<script>alert(1)</script> & &lt; <!-- x",
    "<!-- x",
    "<div",
    "**bold** _i_ __init__ *a* ~~gone~~ ![i](u) [x](http://y) [x]: z",
    "# heading",
    "- item",
    "+ item",
    "1. item",
    "12) item",
    "===",
    "---",
    "> quote",
    r"\ \\ \| \* back\slash",
    "one ` backtick",
    "😀 ü |",
    "-1.5",
    "1.5e-5",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_shown_as_it_is(text):
    meant = " ".join(text.split())
    assert blocks(f"- x\n- {escape(text)}\n", "p") == ["x", meant]
    assert blocks(f"## {escape(text)}\n", "h2") == [meant]
    assert blocks(bullets([text, "y"]), "p") == [meant, "y"]
    assert blocks(table(["a", "b"], [[text, text], ["1", "2"]]), "td") == [meant, meant, "1", "2"]
    assert blocks(table([text, "b"], [["1", "2"]]), "th") == [meant, "b"]


def test_what_stands_in_backticks_is_code():
    (token,) = READER.parseInline(escape("set `a_b*c` to `x`"))
    assert [(one.type, one.content) for one in token.children if one.content] == [
        ("text", "set "),
        ("code_inline", "a_b*c"),
        ("text", " to "),
        ("code_inline", "x"),
    ]
    assert blocks(table(["h"], [["`a|b` | c"]]), "td") == ["a|b | c"]


def test_control_characters_are_left_out():
    assert escape("a\x00b\x1b[31mc\x7f") == r"ab\[31mc"


def test_numbers_of_a_table_stand_to_the_right():
    assert table(["site", "kind", "RMS"], [["0", "mlp", "1.00"]], text=2) == (
        "| site | kind | RMS |\n| --- | --- | ---: |\n| 0 | mlp | 1.00 |"
    )


def test_long_tables_keep_their_ends_and_what_is_asked_for():
    rows = [[str(i), "x"] for i in range(64)]
    assert elided(rows[:24]) == rows[:24]
    kept = elided(rows, lambda i: i in (0, 30, 31, 63))
    assert [row[0] for row in kept] == [
        *map(str, range(6)), "(24 rows)", "30", "31", "(26 rows)", *map(str, range(58, 64))
    ]  # fmt: skip
    assert all(len(row) == 2 for row in kept)
    assert len(elided(rows, lambda _: True)) == 64


def test_a_run_is_written_with_its_findings_blocks_and_summary():
    run = judged(run_of(factors(64, forward=1.1)))
    text = scan_markdown(run)
    assert blocks(text, "h2") == ["propcheck scan: synthetic"]
    assert blocks(text, "h3") == ["Findings: 1 error, 0 warnings, 0 notes", "By block", "Summary"]
    (found,) = run.findings
    where = found.site
    paragraphs = blocks(text, "p")
    assert paragraphs[0] == "synthetic: Synthetic, 1k parameters, 64 blocks, 128 sites, width 5120, placement pre, bf16"
    assert paragraphs[1] == (
        f"error PC201 explosion, block {where.block}, {where.sublayer}, {where.module}<br>\n{found.message}<br>\n"
        f"What to do. {found.remedy}"
    )
    assert any("x1.1 per block, x405 over 63 blocks" in one for one in paragraphs)  # 1.1^63 = 405
    cells = blocks(text, "td")
    shown = [cells[i] for i in range(0, len(cells), 9)]
    assert shown[:7] == ["0", "1", "2", "3", "4", "5", "(52 rows)"]
    assert shown[-6:] == ["58", "59", "60", "61", "62", "63"]
    assert cells[:2] == ["0", "attn+mlp"]


def test_the_blocks_that_findings_name_are_shown():
    run = run_of(factors(64), findings=(finding("PC205", place=Place(site=60, block=30)), finding("PC304", place=None)))
    cells = blocks(scan_markdown(run), "td")
    assert [cells[i] for i in range(0, len(cells), 9)][6:9] == ["(24 rows)", "30", "(27 rows)"]


def test_of_a_named_block_all_rows_are_shown():
    sites = [dataclasses.replace(one, block=one.site // 4) for one in factors(64)]  # two mixers and two networks a block
    run = run_of(sites, findings=(finding("PC205", place=Place(site=60, block=15)),))
    cells = blocks(scan_markdown(run), "td")
    labels = [cells[i] for i in range(0, len(cells), 9)]
    at = labels.index("15")
    assert labels[at - 1 : at + 3] == ["(24 rows)", "15", "", "(26 rows)"]


def test_sites_without_blocks_are_named_by_site():
    sites = [dataclasses.replace(one, block=None) for one in additive(3)]
    text = scan_markdown(run_of(sites))
    assert "By site" in blocks(text, "h3")
    assert blocks(text, "th")[0] == "site"


def test_hostile_findings_stay_entries_of_one_list():
    run = run_of(additive(2), target=HOSTILE, findings=FINDINGS)
    text = scan_markdown(run)
    assert [token.tag for token in READER.parse(text) if token.type == "heading_open"] == ["h2", "h3", "h3", "h3"]
    lists = text.split("### ")[1]
    tokens = READER.parse(lists)
    assert sum(token.type == "list_item_open" for token in tokens) == len(FINDINGS)
    assert sum(token.type == "bullet_list_open" for token in tokens) == 1
    inline = [child for token in tokens if token.type == "inline" for child in token.children]
    assert {child.type for child in inline} <= {"text", "strong_open", "strong_close", "em_open", "em_close", "softbreak",
                                                "html_inline", "code_inline", "text_special"}  # fmt: skip
    assert {child.content for child in inline if child.type == "html_inline"} == {"<br>"}


def test_nothing_found_and_nothing_observed_are_said():
    text = scan_markdown(run_of([], loss=None))
    assert "No findings." in blocks(text, "p")
    assert "By" not in " ".join(blocks(text, "h3"))


def test_a_page_fits_a_job_summary_and_counts_what_it_leaves_out():
    many = tuple(finding("PC304", message=f"{i} " + "ü|" * 2000) for i in range(1000))
    text = scan_markdown(run_of(qwen(), findings=many))
    assert 800_000 < len(text.encode()) <= markdown.LIMIT < 2**20
    shown = sum(one.startswith("error PC304") for one in blocks(text, "p"))
    assert f"{1000 - shown} of 1000 omitted to fit a job summary; the JSON output has all." in blocks(text, "p")
    assert blocks(text, "h3")[-1] == "Summary"
