"""Annotations: one command a line, which the runner decodes to what was said."""

import pytest
from hostile import FINDINGS, HOSTILE, finding, results

from propcheck.records import Place
from propcheck.render.github import to_github
from propcheck.render.results import rule_check
from propcheck.render.source_location import Location
from propcheck.rules import find

# What the runner decodes (github.com/actions/runner, src/Runner.Common/ActionCommand.cs), "%25" last.
DATA = (("%0D", "\r"), ("%0A", "\n"), ("%25", "%"))
PROPERTY = (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%"))


def decoded(text, table):
    for written, meant in table:
        text = text.replace(written, meant)
    return text


def parsed(line):
    """Read a command as the runner does: up to the first "::" after the name, properties at commas, their values at "="."""
    assert line.startswith("::")
    head, _, data = line[2:].partition("::")
    name, _, properties = head.partition(" ")
    pairs = dict(one.split("=", 1) for one in properties.split(","))
    return name, {key: decoded(value, PROPERTY) for key, value in pairs.items()}, decoded(data, DATA)


def test_an_annotation_is_written_as_the_documentation_has_it():
    one = finding("PC301", message="The gradient grows.", remedy="Scale it.", name="exploding-gradient")
    assert to_github(results([one], location=Location("probes/a.toml", 3), checks=(rule_check(find("PC301")),))) == (
        "::error file=probes/a.toml,line=3,title=PC301 exploding-gradient::The gradient grows.%0AScale it.\n"
    )


@pytest.mark.parametrize(
    ("meant", "data", "in_property"),
    [
        ("%", "%25", "%25"),
        ("\r", "%0D", "%0D"),
        ("\n", "%0A", "%0A"),
        (":", ":", "%3A"),
        (",", ",", "%2C"),
        ("%0A", "%250A", "%250A"),
        ("::error::x", "::error::x", "%3A%3Aerror%3A%3Ax"),
        ("a=b;c", "a=b;c", "a=b;c"),
    ],
)
def test_characters_are_escaped_as_the_toolkit_does(meant, data, in_property):
    one = finding(message=meant, name=meant, remedy="")
    line = to_github(results([one], location=Location(meant))).removesuffix("\n")
    assert line == f"::error file={in_property},line=1,title=X1 {in_property}::{data}%0A"


def test_severities_have_their_command():
    names = [parsed(line)[0] for line in to_github(results()).removesuffix("\n").split("\n")]
    assert names == ["error", "error", "error", "warning", "notice"]


def test_hostile_texts_come_back_whole_and_make_no_line_of_their_own():
    lines = to_github(results()).removesuffix("\n").split("\n")
    assert len(lines) == len(FINDINGS)
    name, properties, message = parsed(lines[2])
    assert (name, properties) == ("error", {"file": "my probes/a:b.toml", "line": "12", "title": "X1 first-thing"})
    assert message == f"{HOSTILE}\n{HOSTILE}\nAlso: {HOSTILE}."


def test_without_a_file_there_is_none():
    text = to_github(results([finding(place=Place(site=1))], location=None))
    assert text == "::error title=X1 first-thing::It grows.%0AScale it.\n"


def test_nothing_found_is_nothing_printed():
    assert to_github(results([])) == ""
