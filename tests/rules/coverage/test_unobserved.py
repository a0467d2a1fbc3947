"""PC502 and PC503: what was not seen is said."""

from synthetic import additive, run_of

from propcheck.rules import judge

FUSED = tuple(f"encoder.layers.{n}: runs as one fused function (_transformer_encoder_layer_fwd)" for n in range(6))


def test_a_run_without_sites_says_that_silence_means_nothing():
    (finding,) = judge(run_of([]))
    assert finding.rule == "PC502"
    assert finding.severity == "warning"
    assert "the absence of such findings means nothing" in finding.message


def test_one_site_is_enough():
    assert not judge(run_of(additive(1)[:1]), select=["PC502", "PC503"])


def test_places_that_could_not_be_followed_are_named_there():
    findings = judge(run_of([], unobserved=FUSED))
    assert [f.rule for f in findings] == ["PC502", "PC503"]
    for finding in findings:
        assert "encoder.layers.*: runs as one fused function (_transformer_encoder_layer_fwd) (6 of them)" in finding.message


def test_they_are_a_note_beside_sites():
    (finding,) = judge(run_of(additive(2), unobserved=("vision.0: a compiled module.", "text: a kernel")), select=["PC503"])
    assert finding.severity == "note"
    assert finding.value == 2
    assert finding.site.module == "vision.0"
    assert finding.message.startswith("2 places could not be followed")
    assert finding.message.endswith("vision.0: a compiled module; text: a kernel.")


def test_a_long_list_is_cut():
    places = tuple(f"part{letter}: a kernel" for letter in "abcdefgh")
    (finding,) = judge(run_of(additive(2), unobserved=places), select=["PC503"])
    assert finding.message.endswith("parte: a kernel; and 3 more.")
