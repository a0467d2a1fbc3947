"""Rules: each reads the records of a run and reports where they break it.

Rules judge only. They do not render, and do not know how the run was made.
"""

from propcheck.rules.explain import explain, markdown
from propcheck.rules.judge import RuleSetting, judge
from propcheck.rules.registry import ALL, chosen, find
from propcheck.rules.rule import Rule

__all__ = ["ALL", "Rule", "RuleSetting", "chosen", "explain", "find", "judge", "markdown"]
