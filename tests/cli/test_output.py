"""What is printed and written: six formats, any number of files, refusals before the work."""

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from rich.text import Text
from synthetic import additive, run_of

import propcheck.cli.app
from propcheck.cli.output import FORMATS, OutputOptions, check_outputs, emit
from propcheck.errors import PropcheckError

TINY = ["--set=model.layers=2", "--set=model.width=32", "--set=model.vocabulary=50", "--tokens=8", "--no-plots", "--threads=1"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def emitted(*outputs, output_format="table", views=None, table=None):
    calls = []
    shown = {one: (lambda one=one: calls.append(one) or f"{one}!\n\n") for one in FORMATS if one != "table"}
    emit(
        OutputOptions(output_format=output_format, outputs=list(outputs)),
        table=table or (lambda console: console.print(Text("a table", style="bold red"))),
        views={**shown, **(views or {})},
    )
    return calls


def test_files_have_the_format_of_their_suffix_or_of_their_name(capsys):
    names = ("a.txt", "b.json", "c.md", "d.xml", "e.SARIF", "github=f.out", "junit=deep/er/g.sarif", "./lr=1/h.json")
    calls = emitted(*names)
    assert Path("a.txt").read_text() == "a table\n"
    assert {name: Path(name).read_text() for name in ("b.json", "c.md", "d.xml", "e.SARIF", "f.out", "lr=1/h.json")} == {
        "b.json": "json!\n",
        "c.md": "markdown!\n",
        "d.xml": "junit!\n",
        "e.SARIF": "sarif!\n",
        "f.out": "github!\n",
        "lr=1/h.json": "json!\n",
    }
    assert Path("deep/er/g.sarif").read_text() == "junit!\n"
    assert sorted(calls) == ["github", "json", "junit", "markdown", "sarif"]  # once each
    assert capsys.readouterr().out == "a table\n"


@pytest.mark.parametrize("kind", [one for one in FORMATS if one != "table"])
def test_one_format_is_printed_and_no_other_rendered(kind, capsys):
    assert emitted(output_format=kind) == [kind]
    assert capsys.readouterr().out == f"{kind}!\n"


def test_nothing_is_not_an_empty_line(capsys):
    emitted("github=a", output_format="github", views={"github": lambda: ""})
    assert capsys.readouterr().out == ""
    assert Path("a").read_bytes() == b""


def test_a_table_in_a_file_is_plain_and_of_one_width(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")

    def table(console):
        console.print(Text("x" * 250, style="bold red"))
        console.print(Text("y"), justify="right")
        console.print("z" + " " * 40)

    emitted("a.txt", table=table)
    assert Path("a.txt").read_text() == "\n".join(["x" * 100, "x" * 100, "x" * 50, " " * 99 + "y", "z", ""])
    assert "\x1b[" in capsys.readouterr().out


def test_a_file_is_replaced_whole_or_left_alone(monkeypatch):
    Path("a.json").write_text("before")

    def fails():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        emitted("a.json", views={"json": fails})
    assert Path("a.json").read_text() == "before"

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(PropcheckError, match=r"^--output a\.json: No space left on device$"):
        emitted("a.json")
    assert [path.name for path in Path().iterdir()] == ["a.json"]
    assert Path("a.json").read_text() == "before"


def test_a_link_stays_and_its_file_is_written():
    Path("real.json").write_text("before")
    Path("link.json").symlink_to("real.json")
    emitted("link.json")
    assert Path("link.json").is_symlink()
    assert Path("real.json").read_text() == "json!\n"


def test_what_no_encoding_holds_is_marked():
    emitted("a.md", views={"markdown": lambda: "a\udcffb"})
    assert Path("a.md").read_bytes() == b"a?b\n"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("report", "--output report: no suffix; use .txt, .json, .md, .xml, .sarif, or FORMAT=FILE, e.g. github=report"),
        ("a.html", ("--output a.html: unknown suffix .html; use .txt, .json, .md, .xml, .sarif, or FORMAT=FILE, "
                    "e.g. github=a.html")),
        ("sraif=a.json", ("--output sraif=a.json: unknown format sraif; formats: table, json, markdown, github, junit, sarif; "
                         "for a file of this name write ./sraif=a.json")),
        ("github=-", "--output github=-: no file name; use --output-format for standard output"),
        ("-", "--output -: no file name; use --output-format for standard output"),
        ("", "--output : no file name; use --output-format for standard output"),
        ("json=", "--output json=: no file name; use --output-format for standard output"),
        ("folder.md", "--output folder.md: this is a directory; name a file in it"),
        ("file/a.md", "file: {here}/file is not a directory"),
        ("json=/dev/null", "--output json=/dev/null: not a regular file; use --output-format for standard output"),
        ("reports/tiny/run.json", "--output reports/tiny/run.json: the command itself uses that file as well; name another"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_refused(folder, given, said):
    Path("folder.md").mkdir()
    Path("file").touch()
    with pytest.raises(PropcheckError) as refused:
        check_outputs(OutputOptions(outputs=[given]), taken=[Path("reports/tiny/run.json")])
    assert str(refused.value).removeprefix(f"{folder}/") == said.format(here=folder)


def test_two_outputs_of_one_file_are_refused():
    Path("link.md").symlink_to("a.md")
    for second in ("json=a.md", "./a.md", "x/../a.md", "link.md"):
        with pytest.raises(PropcheckError, match=r"--output a\.md uses that file as well; name another$"):
            check_outputs(OutputOptions(outputs=["a.md", second]))
    check_outputs(OutputOptions(outputs=["a.md", "a.json"]))


def test_a_scan_refuses_before_it_scans(monkeypatch, capsys):
    monkeypatch.setattr("propcheck.api.scan.measure_and_judge", pytest.fail)
    for given, said in (
        ("a.html", "unknown suffix .html"),
        ("reports/tiny/run.json", "the command itself uses that file as well"),
    ):
        assert propcheck.cli.app.run(["scan", "tiny", "--output", given]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert said in err


def test_a_scan_writes_all_six_formats_at_once(capsys):
    Path("my tiny.toml").write_text('base = "tiny"\n')
    files = [f"--output={name}" for name in ("a.txt", "b.json", "c.md", "d.xml", "e.sarif", "github=f")]
    status = propcheck.cli.app.run(
        ["scan", "my tiny.toml", *TINY, *files, "--output-format", "github", "--fail-level", "note", "-q"]
    )
    out, err = capsys.readouterr()
    assert err == ""
    document = json.loads(Path("b.json").read_text())
    found = [one["rule"] for one in document["findings"]]
    assert status == (1 if found else 0)
    assert found, "a tiny decoder at its defaults has findings, else this shows nothing"
    assert Path("f").read_text() == out
    assert [line.partition("title=")[2][:5] for line in out.splitlines()] == found
    assert all("file=my tiny.toml,line=1," in line for line in out.splitlines())
    assert Path("a.txt").read_text().startswith("my tiny.toml: Decoder, ")
    assert Path("c.md").read_text().startswith("## propcheck scan: my tiny.toml\n")
    failed = [case.get("name")[:5] for case in ET.parse("d.xml").iter("testcase") if case.find("failure") is not None]
    assert failed == sorted(set(found))
    sarif = json.loads(Path("e.sarif").read_text())["runs"][0]
    assert [one["ruleId"] for one in sarif["results"]] == found
    uris = {one["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for one in sarif["results"]}
    assert uris == {"my%20tiny.toml"}


def test_a_scan_says_on_stderr_where_the_run_lies_unless_the_table_does(capsys):
    for kind in ("markdown", "github", "junit", "sarif"):
        assert propcheck.cli.app.run(["scan", "tiny", *TINY, "--output-format", kind, "--fail-level", "never"]) == 0
        assert capsys.readouterr().err.endswith("propcheck: wrote reports/tiny\n")


def test_a_synthetic_run_has_all_six_formats(capsys):
    from propcheck.render.github import to_github
    from propcheck.render.json import to_json
    from propcheck.render.junit import to_junit
    from propcheck.render.markdown import scan_markdown
    from propcheck.render.results import scan_results
    from propcheck.render.sarif import to_sarif
    from propcheck.render.terminal.run_table import print_run

    run = run_of(additive(4))
    results = scan_results(run, ("error",), location=None)
    renderers = {"json": to_json, "markdown": scan_markdown}
    views = {kind: (lambda one=one: one(run)) for kind, one in renderers.items()}
    views |= {
        kind: (lambda one=one: one(results)) for kind, one in (("github", to_github), ("junit", to_junit), ("sarif", to_sarif))
    }
    assert {"table", *views} == set(FORMATS)
    emitted(
        "a.txt", "b.json", "c.md", "d.xml", "e.sarif", "github=f", views=views, table=lambda console: print_run(run, console)
    )
    assert "No findings." in capsys.readouterr().out
    assert {path.name: path.stat().st_size > 0 for path in Path().iterdir()} == {
        "a.txt": True, "b.json": True, "c.md": True, "d.xml": True, "e.sarif": True, "f": False
    }  # fmt: skip
