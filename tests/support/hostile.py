"""Findings and results whose texts try to break out of every format."""

import math

from propcheck.records import Finding, Place
from propcheck.render.results import Check, Results
from propcheck.render.source_location import Location

HOSTILE = 'a % b\r\n::error::c, d: <e> & "f" | `g` **h** \x00\x1b[31m \ud800 😀 ]]> {0} [x](1) # _i_ \\'
CHECKS = tuple(
    Check(f"X{number}", name, severity, f"{HOSTILE} sees.", f"## X{number}\n\n**What it sees.** {HOSTILE}")
    for number, name, severity in ((1, "first-thing", "error"), (2, "second-thing", "warning"), (3, "third-thing", "note"))
)


def finding(rule="X1", severity="error", place=None, *, name="first-thing", message="It grows.", **changes):
    fields = {"metric": "sum_rms", "value": 2.0, "expected": 1.0, "remedy": "Scale it.", **changes}
    return Finding(rule, name, severity, place, message=message, **fields)


PLACE = Location("my probes/a:b.toml", 12)
FINDINGS = (
    finding(place=Place(site=7, block=3, sublayer="mlp", module="blocks.3.mlp", parameter="blocks.3.mlp.w")),
    finding(place=Place(site=7, block=3, sublayer="mlp", module="blocks.3.mlp", parameter="blocks.3.mlp.w"), value=3.0),
    finding(message=HOSTILE, remedy=HOSTILE, value=math.nan, expected=math.inf, also=(HOSTILE,)),
    finding("X2", "warning", Place(module=HOSTILE), name="second-thing", value=-math.inf, expected=None),
    finding("X3", "note", Place(), name="third-thing", value="float32", expected="bfloat16"),
)


def results(findings=FINDINGS, *, location=PLACE, failing=("error",), **changes):
    fields = {
        "command": "scan",
        "subject": "my probes/a:b.toml",
        "checks": CHECKS,
        "facts": ("It is so.", HOSTILE),
        "seconds": 1.5,
    }
    return Results(location=location, findings=tuple(findings), failing=failing, **{**fields, **changes})
