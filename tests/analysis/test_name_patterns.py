"""Names that differ in numbers."""

from synthetic import parameter

from propcheck.analysis.name_patterns import families, folded, numbers, path, pattern, subject


def test_numbers_in_a_name_are_its_parts_that_are_numbers():
    assert pattern("blocks.12.conv1d.0.weight") == "blocks.*.conv1d.*.weight"
    assert numbers("blocks.12.conv1d.0.weight") == (12, 0)
    assert pattern("") == ""


def test_a_tied_parameter_goes_by_its_first_name():
    assert path(parameter("embedding.weight = head.weight")) == "embedding.weight"


def test_members_are_in_the_order_of_their_numbers_and_alike():
    names = ["a.10.w", "a.9.w", "b.1.w", "a.2.w"]
    other = parameter("a.3.w", shape=(7, 7))
    found = families([*map(parameter, names), other])
    assert [[p.name for p in family] for family in found] == [["a.2.w", "a.9.w", "a.10.w"], ["b.1.w"], ["a.3.w"]]


def test_a_few_names_are_findings_of_their_own_and_many_are_one():
    few = [parameter(f"{name}.{n}") for n in range(3) for name in "abcde"]
    assert [len(group) for group in folded(few)] == [3] * 5
    assert [len(group) for group in folded([*few, parameter("f")])] == [16]
    assert folded([]) == []


def test_a_subject_says_what_and_where():
    buffers = [parameter(f"a.{n}", kind="buffer", block=n) for n in (3, 8)]
    assert subject(buffers[:1]) == "The buffer a.3"
    assert subject(buffers) == "The 2 buffers a.* (blocks 3 to 8)"
    assert subject([*buffers, parameter("b")]) == "The 3 tensors a.*, b (blocks 3 to 8)"


def test_a_number_that_all_share_is_kept():
    both = [parameter(f"h.5.{name}", block=5) for name in ("n1.weight", "n1.bias")]
    assert subject(both) == "The 2 parameters h.5.n1.weight, h.5.n1.bias (block 5)"
    assert subject([parameter(f"h.{n}.mlp.0.w") for n in (1, 2)]) == "The 2 parameters h.*.mlp.0.w"
    assert subject([parameter("h.1.0.w"), parameter("h.2.3.w"), parameter("a.7")]) == "The 3 parameters h.*.*.w, a.7"


def test_names_beyond_the_first_five_are_counted():
    names = [parameter(name) for name in "abcdefg"]
    assert subject(names[:6]).endswith("a, b, c, d, e and 1 more name")
    assert subject(names).endswith("a, b, c, d, e and 2 more names")
