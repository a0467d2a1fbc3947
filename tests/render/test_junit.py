"""The JUnit report, parsed back."""

from xml.etree import ElementTree as ET

import pytest
from hostile import FINDINGS, HOSTILE, finding, results

from propcheck.render.junit import to_junit


def suite(*args, **options):
    root = ET.fromstring(to_junit(results(*args, **options)))
    assert root.tag == "testsuites"
    (only,) = root
    assert only.tag == "testsuite"
    assert all(root.get(key) == only.get(key) for key in ("tests", "failures", "errors", "time"))
    return only


def cases(one):
    return {case.get("name"): case for case in one.findall("testcase")}


def test_a_check_is_a_case_that_fails_where_a_failing_finding_is():
    one = suite()
    assert {key: one.get(key) for key in ("name", "tests", "failures", "errors", "skipped", "time")} == {
        "name": "propcheck scan my probes/a:b.toml",
        "tests": "3",
        "failures": "1",
        "errors": "0",
        "skipped": "0",
        "time": "1.500",
    }
    found = cases(one)
    assert list(found) == ["X1 first-thing", "X2 second-thing", "X3 third-thing"]
    assert {case.get("classname") for case in found.values()} == {"propcheck.scan"}
    assert {(case.get("file"), case.get("line")) for case in found.values()} == {("my probes/a:b.toml", "12")}
    failure = found["X1 first-thing"].find("failure")
    assert (failure.get("message"), failure.get("type")) == ("It grows. (and 2 findings more)", "error")
    assert failure.text.startswith("error: It grows.\nScale it.\n\nerror: It grows.\nScale it.\n\nerror: a % b")
    assert found["X2 second-thing"].find("failure") is None
    assert found["X3 third-thing"].find("system-out").text == "note: It grows.\nScale it."


@pytest.mark.parametrize(
    ("failing", "failures"), [((), 0), (("error",), 1), (("warning", "error"), 2), (("note", "warning", "error"), 3)]
)
def test_failures_follow_what_fails(failing, failures):
    one = suite(failing=failing)
    assert one.get("failures") == str(failures)
    assert len(one.findall("testcase/failure")) == failures


def test_findings_of_both_kinds_in_one_check_are_both_told():
    case = cases(suite([finding(), finding(severity="note", message="Well.")]))["X1 first-thing"]
    assert case.find("failure").text == "error: It grows.\nScale it."
    assert case.find("system-out").text == "note: Well.\nScale it."


def test_hostile_texts_come_back_without_what_xml_cannot_hold():
    kept = HOSTILE.replace("\x00", "").replace("\x1b", "").replace("\ud800", "")
    one = suite(FINDINGS[2:3], subject=HOSTILE, location=None)
    assert one.get("name") == f"propcheck scan {kept}"
    failure = one.find("testcase/failure")
    assert failure.get("message") == kept
    assert failure.text.count("😀") == 3
    assert failure.text.startswith(f"error: {kept}".replace("\r\n", "\n"))  # a parser reads every line end as one character
    assert one.find("system-out").text.startswith("It is so.\na % b\n::error::c, d: <e> & ")


@pytest.mark.parametrize("code", [*range(0x20), 0xD800, 0xDFFF, 0xFFFE, 0xFFFF, 0x7F, 0x85, 0x2028, 0x10FFFF])
def test_any_character_gives_a_document(code):
    text = to_junit(results([finding(message=f"a{chr(code)}b")], subject=chr(code), facts=(chr(code),)))
    ET.fromstring(text.encode())


def test_nothing_found_passes_and_an_unknown_time_is_left_out():
    one = suite([], seconds=None, facts=(), location=None)
    assert (one.get("failures"), one.get("time"), one.find("system-out")) == ("0", None, None)
    assert all(len(case) == 0 and case.get("file") is None for case in one)
