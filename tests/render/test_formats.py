"""The JSON document keeps the contract."""

import dataclasses
import json
import math

from synthetic import qwen, run_of

from propcheck import rules
from propcheck.records import SiteRecord
from propcheck.render.json import to_json


def refuse(token):
    raise AssertionError(f"bare {token}")


def test_the_document_has_the_contracts_keys():
    run = run_of(qwen())
    run = dataclasses.replace(run, findings=rules.judge(run))
    document = json.loads(to_json(run), parse_constant=refuse)
    assert set(document) == {"schema_version", "run", "loss", "findings", "growth", "sublayers"}
    assert document["schema_version"] == 1
    assert set(document["run"]) == {"path", "target", "model", "precision", "inputs", "seeds", "engine", "versions"}
    assert set(document["run"]["model"]) == {"class", "parameters", "blocks", "sites", "width", "placement"}
    assert {"mode", "wall_seconds", "peak_rss_bytes"} <= set(document["run"]["engine"])
    assert set(document["loss"]) == {"value", "uniform", "logit_std", "logit_absmax", "lowest", "highest", "by_seed"}
    finding = document["findings"][0]
    assert set(finding) == {
        "rule",
        "name",
        "severity",
        "site",
        "metric",
        "value",
        "expected",
        "message",
        "remedy",
        "source",
        "also",
    }
    assert set(finding["site"]) == {"site", "block", "sublayer", "module", "parameter"}
    assert len(document["sublayers"]) == 128
    assert list(document["sublayers"][0]) == [f.name for f in dataclasses.fields(SiteRecord)]


def test_numbers_that_json_lacks_are_strings_and_unobserved_ones_null():
    record = dataclasses.replace(qwen()[0], cosine=math.nan, sum_rms=math.inf, sum_mean=-math.inf, block=None)
    row = json.loads(to_json(run_of([record], loss=None)), parse_constant=refuse)["sublayers"][0]
    assert (row["cosine"], row["sum_rms"], row["sum_mean"], row["block"]) == ("NaN", "Infinity", "-Infinity", None)
