"""docs/validation.md is the page that docs/validation.py makes; its numbers are checked where they are measured."""

import runpy

from published import PAGE


def test_the_page_has_the_words_and_every_row():
    script = runpy.run_path(str(PAGE.with_name("validation.py")))
    page = PAGE.read_text(encoding="utf-8")
    assert page.startswith(script["INTRODUCTION"])
    assert all(f"\n{text}\n" in page for text in script["SECTIONS"].values())
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert len(rows) == 5 + (8 + 4 + 8 + 3 + 6)  # the heads and the rows of each section
    assert len(set(rows)) == 1 + 29
