"""The SARIF log against the schema of the standard, and what code scanning asks for beyond it."""

import dataclasses
import json
import urllib.parse
from pathlib import Path

import jsonschema
import pytest
from hostile import CHECKS, FINDINGS, HOSTILE, finding, results
from synthetic import factors, run_of

from propcheck import rules
from propcheck.records import Place
from propcheck.render.results import scan_results
from propcheck.render.sarif import to_sarif
from propcheck.render.source_location import Location

SCHEMA = json.loads((Path(__file__).parent / "sarif-schema-2.1.0.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft4Validator(SCHEMA)


def log_of(*args, **options):
    return checked(to_sarif(results(*args, **options)))


def checked(text):
    document = json.loads(text, parse_constant=pytest.fail)
    assert [error.message for error in VALIDATOR.iter_errors(document)] == []
    assert (document["version"], document["$schema"]) == ("2.1.0", SCHEMA["id"])
    (run,) = document["runs"]
    return run


def test_the_schema_is_the_standards_and_refuses_what_is_wrong():
    assert SCHEMA["title"] == "Static Analysis Results Format (SARIF) Version 2.1.0 JSON Schema"
    document = json.loads(to_sarif(results()))
    wrong = json.loads(json.dumps(document))
    wrong["runs"][0]["results"][0]["level"] = "notice"
    assert not VALIDATOR.is_valid(wrong)
    wrong = json.loads(json.dumps(document))
    wrong["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["region"]["startLine"] = 0
    assert not VALIDATOR.is_valid(wrong)


@pytest.mark.parametrize("location", [None, Location("a b/c.toml", 1)])
@pytest.mark.parametrize("findings", [FINDINGS, ()])
def test_a_log_is_valid(findings, location):
    run = log_of(findings, location=location)
    assert len(run["results"]) == len(findings)


def test_a_real_scan_is_valid_and_names_every_rule():
    run = run_of(factors(64, backward=1.1))
    run = dataclasses.replace(run, findings=rules.judge(run))
    log = checked(to_sarif(scan_results(run, ("error",), location=None)))
    driver = log["tool"]["driver"]
    assert [rule["id"] for rule in driver["rules"]] == [rule.id for rule in rules.ALL]
    assert {result["ruleId"] for result in log["results"]} >= {"PC301"}
    for result in log["results"]:
        assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
    for rule in driver["rules"]:  # code scanning cuts a description at 1024 characters
        assert len(rule["fullDescription"]["text"]) <= 1024
        assert rule["help"]["text"] != rule["help"]["markdown"]


def test_a_result_says_what_where_and_how_much():
    (result,) = log_of(FINDINGS[:1])["results"]
    assert (result["ruleId"], result["ruleIndex"], result["level"]) == ("X1", 0, "error")
    assert result["message"]["text"] == "It grows.\nScale it."
    (where,) = result["locations"]
    assert where["physicalLocation"]["region"] == {"startLine": 12}
    assert [(one["kind"], one["name"]) for one in where["logicalLocations"]] == [
        ("block", "block 3"),
        ("sublayer", "mlp"),
        ("site", "site 7"),
        ("module", "blocks.3.mlp"),
        ("parameter", "blocks.3.mlp.w"),
    ]
    assert {key: result["properties"][key] for key in ("metric", "value", "expected")} == {
        "metric": "sum_rms",
        "value": 2.0,
        "expected": 1.0,
    }


@pytest.mark.parametrize(
    ("file", "uri"),
    [
        ("my probes/a.toml", "my%20probes/a.toml"),
        ("a:b.toml", "a%3Ab.toml"),
        ("50%#?.toml", "50%25%23%3F.toml"),
        ("ü.py", "%C3%BC.py"),
    ],
)
def test_a_file_is_a_relative_reference(file, uri):
    (result,) = log_of(FINDINGS[:1], location=Location(file))["results"]
    written = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert written == uri
    parts = urllib.parse.urlsplit(written)
    assert (parts.scheme, parts.netloc, urllib.parse.unquote(parts.path)) == ("", "", file)


def test_a_place_without_a_file_is_no_location_but_a_property():
    """GitHub refuses a whole log for one location without a file."""
    result = log_of(FINDINGS[:1], location=None)["results"][0]
    assert "locations" not in result
    assert result["properties"]["place"]["module"] == "blocks.3.mlp"


def test_numbers_that_json_lacks_are_strings_and_absent_ones_null():
    values = [(one["properties"]["value"], one["properties"]["expected"]) for one in log_of()["results"]]
    assert values == [(2.0, 1.0), (3.0, 1.0), ("NaN", "Infinity"), ("-Infinity", None), ("float32", "bfloat16")]


def test_hostile_texts_come_back_and_braces_are_no_placeholders():
    run = log_of(FINDINGS[2:3])
    doubled = HOSTILE.replace("{0}", "{{0}}")
    assert run["results"][0]["message"]["text"] == f"{doubled}\n{doubled}\nAlso: {doubled}."
    assert run["properties"]["facts"][1] == HOSTILE
    assert run["tool"]["driver"]["rules"][0]["fullDescription"]["text"] == f"{doubled} sees."


def test_a_result_has_the_severity_of_its_finding():
    findings = [finding(severity=severity) for severity in ("error", "warning", "note")]
    assert [one["level"] for one in log_of(findings)["results"]] == ["error", "warning", "note"]


def test_levels_and_descriptions_of_rules_are_the_checks():
    rule_list = log_of()["tool"]["driver"]["rules"]
    assert [rule["defaultConfiguration"]["level"] for rule in rule_list] == ["error", "warning", "note"]
    assert [rule["shortDescription"]["text"] for rule in rule_list] == ["First thing", "Second thing", "Third thing"]
    assert [rule["name"] for rule in rule_list] == [check.name for check in CHECKS]


def prints(*args, **options):
    return [one["partialFingerprints"]["primaryLocationLineHash"] for one in log_of(*args, **options)["results"]]


def test_fingerprints_stay_when_numbers_and_words_change_and_differ_when_places_do():
    place = Place(site=1, block=0, module="a")
    first = prints([finding(place=place), finding(place=place)])
    again = prints(
        [finding(place=place, value=9.0, message="It grows more."), finding(place=place)], location=Location("z", 99)
    )
    assert first == again
    assert len(set(first)) == 2
    others = [
        *prints([finding(place=Place(site=2, block=0, module="a"))]),
        *prints([finding(place=place, metric="update_rms")]),
        *prints([finding(place=None)]),
        *prints([finding(place=place)], subject="another"),
        *prints([finding(place=place)], command="gate"),
        *prints([finding("X2", place=place)]),
    ]
    assert len({*first, *others}) == 8
