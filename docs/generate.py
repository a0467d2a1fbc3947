"""Write the pages that are made from code: ``python docs/generate.py``."""

from pathlib import Path

from propcheck import rules
from propcheck.records import columns

here = Path(__file__).parent
(here / "columns.md").write_text(columns.markdown())
(here / "rules.md").write_text(rules.markdown())
