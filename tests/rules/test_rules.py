"""The framework: what a user can ask of rules, and that no input breaks them."""

import ast
import dataclasses
import math
import random
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from synthetic import additive, factors, parameter, run_of

from propcheck import rules
from propcheck.errors import PropcheckError
from propcheck.records import ParameterRecord, SiteRecord

NAMES = {
    "PC101": "non-finite-parameter",
    "PC102": "uninitialized-parameter",
    "PC103": "symmetric-units",
    "PC104": "init-scale",
    "PC105": "init-outliers",
    "PC106": "norm-gain",
    "PC201": "explosion",
    "PC202": "collapse",
    "PC203": "dead-branch",
    "PC204": "dominant-update",
    "PC205": "residual-discontinuity",
    "PC206": "broken-residual",
    "PC207": "swallowed-update",
    "PC208": "epsilon-dominated",
    "PC209": "non-finite-activation",
    "PC210": "token-collapse",
    "PC211": "dtype-drift",
    "PC212": "activation-range",
    "PC301": "exploding-gradient",
    "PC302": "vanishing-gradient",
    "PC303": "dead-gradient",
    "PC304": "no-gradient",
    "PC305": "non-finite-gradient",
    "PC306": "gradient-step",
    "PC401": "initial-loss",
    "PC402": "logit-scale",
    "PC501": "unused-module",
    "PC502": "no-residual-stream",
    "PC503": "unobserved",
}


def test_the_ids_and_names_are_the_published_ones():
    assert {rule.id: rule.name for rule in rules.ALL} == NAMES


@pytest.mark.parametrize("rule", rules.ALL, ids=lambda rule: rule.id)
def test_a_rule_explains_itself(rule):
    text = rules.explain(rule.id)
    for part in (
        rule.id,
        rule.name,
        rule.sees,
        rule.why,
        rule.formula,
        rule.basis,
        rule.source,
        rule.remedy,
        rule.example.broken,
        rule.example.repaired,
        f"{rule.threshold:g}",
    ):
        assert part in text
    assert rules.explain(rule.name) == text


@pytest.mark.parametrize("rule", rules.ALL, ids=lambda rule: rule.id)
def test_an_example_is_valid_code_and_is_repaired(rule):
    assert rule.example.broken != rule.example.repaired
    for code in (rule.example.broken, rule.example.repaired):
        if rule.example.language == "python":
            ast.parse(code)
        else:
            assert rule.example.language == "toml"
            tomllib.loads(code)


@pytest.mark.parametrize("rule", rules.ALL, ids=lambda rule: rule.id)
def test_a_threshold_that_is_a_factor_must_be_above_1(rule):
    assert rule.least == (1.0 if rule.unit.startswith("factor") else 0.0)
    assert rule.threshold > rule.least or rule.threshold == 0


@pytest.mark.parametrize(("wrong", "right"), [("PC2O1", "PC2"), ("explosoin", "explosion"), ("pc299", "PC2")])
def test_an_unknown_rule_is_refused_with_the_nearest(wrong, right):
    for ask in (
        rules.explain,
        lambda name: rules.judge(run_of([]), select=[name]),
        lambda name: rules.judge(run_of([]), ignore=[name]),
    ):
        with pytest.raises(PropcheckError, match=f"unknown rule {wrong}.*{right}"):
            ask(wrong)


def test_select_and_ignore_choose_rules():
    run = run_of(factors(64, forward=1.1, backward=1.1))
    assert [f.rule for f in rules.judge(run)] == ["PC201"]
    assert [f.rule for f in rules.judge(run, select=["PC301"])] == ["PC301"]
    assert [f.rule for f in rules.judge(run, ignore=["explosion"])] == ["PC301"]


def test_a_family_stands_for_all_its_rules():
    assert [rule.id for rule in rules.chosen(["PC3"])] == [id_ for id_ in NAMES if id_.startswith("PC3")]
    assert [rule.id for rule in rules.chosen(["pc4", "PC501"])] == ["PC401", "PC402", "PC501"]
    assert [rule.id for rule in rules.chosen(["PC2"], ["PC2", "explosion"])] == []
    run = run_of(factors(64, forward=1.1, backward=1.1))
    assert [finding.rule for finding in rules.judge(run, ignore=["PC2"])] == ["PC301"]
    with pytest.raises(PropcheckError, match="unknown rule PC9"):
        rules.chosen(["PC9"])


def test_settings_change_threshold_and_severity():
    run = run_of(factors(64, forward=1.1))
    assert rules.judge(run, {"PC201": SimpleNamespace(threshold=500.0, severity=None)}) == ()
    (finding,) = rules.judge(run, {"PC201": SimpleNamespace(threshold=None, severity="note")})
    assert finding.severity == "note"


def test_findings_are_sorted_errors_first():
    records = additive(8)
    records[3] = dataclasses.replace(records[3], swallowed=0.3)
    records[7] = dataclasses.replace(records[7], nonfinite=1)
    assert [f.severity for f in rules.judge(run_of(records))] == ["error", "note"]


def test_messages_are_sentences_without_long_numbers():
    run = run_of(factors(64, forward=1.1234567, backward=0.7654321))
    for finding in rules.judge(run):
        assert finding.message[0].isupper()
        assert finding.message.endswith(".")
        assert "1.1234" not in finding.message
        assert "0.7654" not in finding.message


@pytest.mark.parametrize("seed", range(60))
def test_no_value_anywhere_breaks_a_rule(seed):
    draw = random.Random(seed)
    floats = [f.name for f in dataclasses.fields(SiteRecord) if f.type == "float | None"]
    records = []
    for run_seed in range(draw.choice([1, 3])):
        for record in additive(draw.choice([1, 2, 5, 16]), seed=run_seed):
            odd = {
                name: draw.choice([None, math.nan, math.inf, -math.inf, 0.0, 1e-300, 1e300])
                for name in floats
                if draw.random() < 0.3
            }
            block = draw.choice([record.block, None])
            records.append(dataclasses.replace(record, **odd, block=block, nonfinite=draw.choice([None, 0, 5]), module=None))
    for finding in rules.judge(run_of(records, seeds=(0, 1, 2), loss=draw.choice([None, math.nan, 5.0]))):
        assert finding.message


@pytest.mark.parametrize("seed", range(60))
def test_no_parameter_breaks_a_rule(seed):
    draw = random.Random(seed)
    values = {
        "float | None": [None, math.nan, math.inf, -math.inf, 0.0, 1e-300, 1e300, -1.0],
        "int | None": [None, 0, 1, 5000],
        "str | None": [None, "", "x", "normal_(0, 1)", "uniform_(0, 1), log_()", "..., (a(), b) x 3"],
        "bool | None": [None, False, True],
        "GradState | None": [None, "norm", "zero", "none", "nonfinite"],
        "Sublayer | None": [None, "moe", "mlp"],
        "tuple[int, ...]": [(), (0,), (5000,), (0, 7), (50, 100), (4, 5, 6)],
    }
    optional = {f.name: values[f.type] for f in dataclasses.fields(ParameterRecord) if f.type in values}
    names = ["c", "d.0", "a.b.weight", *(f"a.{n}.b.{m}.weight" for n in range(4) for m in range(3)), "a.0.c = a.1.c"]
    records = []
    for name in names:
        odd = {field: draw.choice(choices) for field, choices in optional.items() if draw.random() < 0.5}
        role = draw.choice([None, "linear", "convolution", "embedding", "norm", "step_bias"])
        changes = {"shape": (50, 100), **odd, "role": role, "kind": draw.choice(["parameter", "parameter", "buffer"])}
        records.append(parameter(name, **changes, numel=math.prod(changes["shape"])))
    expect = {"init": draw.choice([None, "gpt2", "he", "olmo-llama"]), "std": 0.02, "embedding_std": draw.choice([None, 1.0])}
    for finding in rules.judge(run_of(additive(2), records, settings={"expect": expect})):
        assert finding.message


def test_a_model_without_blocks_is_judged_by_site():
    records = [dataclasses.replace(r, block=None) for r in factors(64, forward=1.21)]
    (finding,) = rules.judge(run_of(records), select=["PC201"])
    assert "x1.1 per site" in finding.message
    assert "over 128 sites" in finding.message


def test_a_run_without_sites_has_that_one_finding():
    assert [finding.rule for finding in rules.judge(run_of([]))] == ["PC502"]


def test_what_is_recorded_of_one_seed_is_not_counted_in_seeds():
    records = [*factors(64, forward=1.1, seed=0), *factors(64, forward=1.1, seed=1)]
    bad = parameter("decay", nonfinite=1, absmax=math.nan)
    found = {f.rule: f.message for f in rules.judge(run_of(records, [bad], seeds=(0, 1)))}
    assert found["PC201"].endswith("Seen in 2 of 2 seeds.")
    assert "seeds" not in found["PC101"]


def test_the_page_of_the_rules_is_fresh():
    page = Path(__file__).parents[2] / "docs" / "rules.md"
    assert page.read_text() == rules.markdown(), "run `make docs`"


def test_a_family_is_the_start_of_an_id():
    assert {rule.id[:3] for rule in rules.chosen(select=["PC1"])} == {"PC1"}
    assert {rule.id for rule in rules.chosen(ignore=["pc2"])} == {rule.id for rule in rules.ALL if rule.id[:3] != "PC2"}
    assert [rule.id for rule in rules.chosen(select=["PC20"], ignore=["PC201"])][:2] == ["PC202", "PC203"]
    for unknown in ("PC", "PC9", "PC1x"):
        with pytest.raises(PropcheckError, match=f"unknown rule {unknown}"):
            rules.chosen(select=[unknown])
