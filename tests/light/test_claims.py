"""What README, docs and the list of claims say is what the result rows say; and a case is one file."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from page_elements import Elements

from upshift.benchmarking import documents
from upshift.benchmarking.claims import CaseFile, ClaimStatus, Source, claim_statuses, find_case, find_cases
from upshift.errors import RequestError
from upshift.reports.claims import claims_page

ROOT = Path(__file__).parents[2]

CASE = '''"""Whether a toy is fast."""

import no_such_library
from upshift.benchmarking.case import command_line
from upshift.benchmarking.claims import Claim, Source

CLAIMS = (
    Claim(
        name="speed", text="the toy is fast", ours="toy", baseline="no toy", goal=4.0,
        of=Source(row="toy", value="details.ratio", where={"size": 2}),
    ),
)
PEERS = {"none": "--contenders toy,none"}
TABLES = (
    Table(name="sizes", header=("size", "ms"), of="toy", each="details.settings.sizes", cells=("{ms:.1f}",)),
    Table(name="faster", header=("toy", "times"), rows=(("2", "{speed:.2f}"),)),
)

if __name__ == "__main__":
    command_line("", results=None)
'''


def row(ratio: float, *, size: int = 2, quick: bool = False) -> str:
    environment = {"time": "2026-11-23T09:00:00+00:00", "commit": "abc"}
    details = {"ratio": ratio, "quick": quick, "settings": {"size": size}}
    return json.dumps({"name": "toy/toy", "details": details, "environment": environment})


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    cases = tmp_path / "benchmarks" / "cases"
    cases.mkdir(parents=True)
    (cases / "toy.py").write_text(CASE)
    (cases / "helper.py").write_text("SHAPES = 1\n")
    results = tmp_path / "benchmarks" / "results"
    results.mkdir()
    (results / "toy.jsonl").write_text("\n".join([row(2.0), row(3.14), row(9.0, size=3), row(7.0, quick=True)]) + "\n")
    (tmp_path / "README.md").write_text('It is [3.1](benchmarks/results/toy.jsonl "toy/speed") times as fast.\n')
    return tmp_path


def test_documents_say_what_the_rows_do() -> None:
    """Byte for byte: whatever is linked to rows, and every table between markers."""
    cases = find_cases(ROOT / "benchmarks" / "cases")
    assert [str(one) for one in documents.find_stale(ROOT, cases)] == []
    texts = {path: path.read_text(encoding="utf-8") for path in documents.document_paths(ROOT)}
    assert all(documents.renew_text(text, cases) == text for text in texts.values())
    tables = [match[0] for text in texts.values() for match in documents.TABLED.finditer(text)]
    assert len(tables) >= 3 and len(documents.figures_of(texts[ROOT / "README.md"])) >= 10


def test_no_measured_number_of_the_readme_is_without_rows() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    start = text.index("Measured on 2 CPU cores")
    section = documents.LINKED.sub("", text[start : text.index("\n## ", start)])
    assert re.findall(r"(?<![\w.])\d+\.\d+", section) == []


def test_every_case_states_what_it_claims() -> None:
    cases = find_cases(ROOT / "benchmarks" / "cases")
    assert len(cases) >= 20 and [name for name, case in cases.items() if not case.claims or not case.text] == []
    for case in cases.values():
        names = [figure.name for figure in case.figures]
        assert len(names) == len({*names}), case.name
        written = {row["name"] for row in case.rows}  # --only leaves some out
        for figure in case.figures:
            if figure.of is not None and f"{case.name}/{figure.of.row}" in written:
                assert case.readings(figure), f"{case.name}/{figure.name} is in no row"


def test_every_case_is_in_the_index_and_has_a_run_of_minutes() -> None:
    cases, index = find_cases(ROOT / "benchmarks" / "cases"), (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert [name for name in cases if f"| [{name}](cases/{name}.py) |" not in index] == []
    assert [name for name, case in cases.items() if not case.suite and name != "suite"] == []


def test_a_wrong_number_is_found_and_renewed(clone: Path) -> None:
    cases, readme = find_cases(clone / "benchmarks" / "cases"), clone / "README.md"
    right = readme.read_text()
    assert list(documents.find_stale(clone, cases)) == [] and documents.renew_documents(clone, cases) == []
    readme.write_text("First.\n" + right.replace("3.1", "5.0"))
    (wrong,) = documents.find_stale(clone, cases)
    assert str(wrong) == "README.md:2: toy/speed is written '5.0', and the rows say '3.1'"
    assert documents.renew_documents(clone, cases) == [readme] and readme.read_text() == "First.\n" + right
    readme.write_text(right.replace("3.1", "3.140 times"))
    assert list(documents.find_stale(clone, cases)) == []  # as many decimals as stand there
    readme.write_text(right.replace("toy/speed", "toy/size"))
    with pytest.raises(RequestError, match="states no figure 'size'; it states speed"):
        documents.renew_documents(clone, cases)


def test_tables_are_what_the_newest_rows_have(clone: Path) -> None:
    cases, readme = find_cases(clone / "benchmarks" / "cases"), clone / "README.md"
    results = clone / "benchmarks/results/toy.jsonl"
    readme.write_text("<!-- rows: toy/sizes -->\n<!-- end -->\n<!-- rows: toy/faster -->\n<!-- end -->\n")
    with pytest.raises(RequestError, match="no row toy/toy of toy.jsonl has details.settings.sizes; run python"):
        documents.renew_documents(clone, cases)
    newest = json.loads(row(5.0))
    newest["details"]["settings"]["sizes"] = {"one": {"ms": 1.26}, "two": {"ms": 2.0}}
    quick = json.loads(json.dumps(newest).replace("1.26", "9.0"))
    quick["details"]["quick"] = True
    results.write_text(results.read_text() + json.dumps(newest) + "\n" + json.dumps(quick) + "\n")
    documents.renew_documents(clone, find_cases(clone / "benchmarks" / "cases"))
    assert [line for line in readme.read_text().splitlines() if line[0] == "|"] == [
        "| size | ms |", "| --- | ---: |", "| one | 1.3 |", "| two | 2.0 |",
        "| toy | times |", "| --- | ---: |", "| 2 | 5.00 |",
    ]  # fmt: skip


def test_a_case_is_read_without_running_it(clone: Path) -> None:
    case = find_case("toy", clone / "benchmarks" / "cases")
    (standing,) = claim_statuses({"toy": case})
    assert [one.value for one in standing.readings] == [2.0, 3.14]  # other settings and --quick are no evidence
    assert standing.value == 3.14 and standing.share == pytest.approx(0.785) and standing.is_reached is False
    assert case.text == "Whether a toy is fast." and case.peers == {"none": "--contenders toy,none"}
    with pytest.raises(RequestError, match="there is no case 'helper'; there are toy"):
        find_case("helper", clone / "benchmarks" / "cases")
    with pytest.raises(RequestError, match="cases come with a clone"):
        find_cases(clone / "nowhere")
    wrong = clone / "wrong.py"
    wrong.write_text("CLAIMS = (Claim(name='a', text='b', ours='c', base='d'),)\n")
    with pytest.raises(RequestError, match="wrong.py, CLAIMS, line 1: .*base"):
        CaseFile(wrong)
    wrong.write_text("CLAIMS = (Claim(name=NAME),)\n")
    with pytest.raises(RequestError, match="'NAME' is computed"):
        CaseFile(wrong)


def test_what_claims_share_is_named_once(clone: Path) -> None:
    named = clone / "named.py"
    named.write_text(
        "ROW = Source(row='a', value='details.a')\nCELLS = ('{a:.1f}',)\n"
        "FIGURES = (Figure(name='a', of=ROW), Figure(name='b', of=ROW, scale=2.0))\n"
        "TABLES = (Table(name='t', header=('a',), cells=CELLS),)\n"
    )
    case = CaseFile(named)
    assert [figure.of for figure in case.figures] == [Source(row="a", value="details.a")] * 2
    assert case.tables[0].cells == ("{a:.1f}",)


def test_the_worst_comes_first() -> None:
    found = claim_statuses(find_cases(ROOT / "benchmarks" / "cases"))

    def key(one: ClaimStatus) -> tuple[bool, bool, float]:
        return (not one.readings, one.share is None, one.share or 0.0)

    assert [key(one) for one in found] == sorted(key(one) for one in found)


def test_page(clone: Path) -> None:
    """Every claim with its numbers, the worst first, hostile text made harmless, and nothing that is loaded."""
    cases = clone / "benchmarks" / "cases"
    (cases / "toy.py").write_text(CASE.replace("the toy is fast", "the <b>toy</b> is fast"))
    (cases / "best.py").write_text(CASE.replace("goal=4.0", "goal=1.0"))
    (clone / "benchmarks/results/best.jsonl").write_text(row(2.0).replace("toy/toy", "best/toy") + "\n")
    content = claims_page(claim_statuses(find_cases(cases)))
    page = Elements(content)
    assert {"distance", "claims", "history", "distances", "times"} <= page.ids()
    figures = json.loads(next(script for script in page.scripts if script.startswith("{")))
    assert figures["distances"]["data"][0]["y"] == ["toy/speed", "best/speed"]
    assert figures["distances"]["data"][0]["x"] == [0.785, 2.0]
    assert figures["times"]["data"][0]["y"] == [1.0, 1.57] and len(figures["times"]["data"]) == 1
    assert "the <b>toy</b> is fast" in page.words and "1 of 2" in page.words and "<b>toy" not in content.split("<main>")[1]
    assert [name for name, said in page.elements if "src" in said or said.get("href", "#")[:1] not in ("#", "d")] == []
    assert claims_page([]).count("<section") == 3


def test_commands(clone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from upshift.cli import main

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["upshift", *words])
        with pytest.raises(SystemExit) as ended:
            main.main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    monkeypatch.chdir(clone)
    assert json.loads(run("bench", "list", "--json")[1])[0]["name"] == "toy/speed"
    code, _, said = run("bench", "run", "toy", "--against", "everyone")
    assert code == 2 and "no peer 'everyone'; use one of none" in said
    (clone / "README.md").write_text('[9.9](benchmarks/results/toy.jsonl "toy/speed")\n')
    code, out, _ = run("bench", "report")
    assert code == 1 and "the rows say '3.1'" in out
    assert "README.md renewed" in run("bench", "report", "--write")[1]
    code, out, _ = run("bench", "compare", f"{sys.executable} -Sc 'print(2)'", "no-such-program", "--rounds", "1")
    assert code == 2
