"""README and the start page in other languages say what the English ones say: the same blocks in the same order, with the same
commands, code, numbers and links. What the words say only a reader can check."""

from __future__ import annotations

import os
import re
from collections import Counter
from itertools import zip_longest
from pathlib import Path

import pytest
from pages import CODE, LINK, ROOT, Block, blocks, place

LANGUAGES = {"zh": "中文", "ja": "日本語", "ar": "العربية", "it": "Italiano"}
ENGLISH = [ROOT / "README.md", ROOT / "docs" / "index.md"]
NUMBER = re.compile(r"(?<![A-Za-z0-9_.])\d+(?:[.,]\d+)*(?![A-Za-z0-9_])")
SCRIPT = {"zh": r"[\u4e00-\u9fff]", "ja": r"[\u3040-\u30ff]", "ar": r"[\u0600-\u06ff]", "it": r"(?i)\b(?:il|la|di|e|da|per)\b"}


def translated(path: Path, language: str) -> Path:
    return ROOT / "docs" / f"{path.stem}.{language}.md"


def is_languages(block: Block) -> bool:
    return block.kind == "text" and sum(f"[{name}](" in block.text for name in LANGUAGES.values()) > 2


def links(block: Block, path: Path, root: Path, language: str | None = None) -> Counter[str]:
    """What is linked to, pictures included, as places in the repository; of a page that is translated, the English one."""
    found: Counter[str] = Counter()
    for _, target, title in LINK.findall(block.text):
        inside = "://" not in target
        name = os.path.relpath(path.parent / target, root) if inside else target
        found[(re.sub(rf"\.{language}\.md", ".md", name) if language else name) + title] += 1
    return found


def numbers(block: Block) -> Counter[str]:
    return Counter(NUMBER.findall(LINK.sub(r"\1", CODE.sub("", block.text))))


def cells(line: str) -> int:
    return len(CODE.sub("", line).split("|"))


def code_of(block: Block) -> Counter[str]:
    return Counter(CODE.findall(block.text))


def less(one: Counter[str], other: Counter[str]) -> str:
    return ", ".join(sorted((one - other).elements())) or "nothing more"


def differences(english: Path, other: Path, language: str, root: Path = ROOT) -> list[str]:
    """One line each, with both places: what an editor has to change."""
    found = []
    for one, two in zip_longest(blocks(english), blocks(other)):
        if one is None or two is None:
            missing, there = (other, place(english, one.line, root)) if two is None else (english, place(other, two.line, root))
            return [*found, f"{there} has no block in its place in {missing.relative_to(root)}"]
        at = f"{place(other, two.line, root)} (English: {place(english, one.line, root)})"
        if one.kind != two.kind:
            return [*found, f"{at} is {two.kind}, in English {one.kind}; what follows was not compared"]
        if one.kind == "fence":
            for offset, (left, right) in enumerate(zip_longest(one.lines, two.lines, fillvalue="")):
                if left != right:
                    here = f"{place(other, two.line + offset, root)} (English: {place(english, one.line + offset, root)})"
                    found.append(f"{here} code is {right!r}, in English {left!r}")
            continue
        if is_languages(one):
            continue
        if one.kind == "table" and [cells(line) for line in one.lines] != [cells(line) for line in two.lines]:
            found.append(f"{at} has {len(two.lines)} rows, in English {len(one.lines)}, or cells are missing")
        pairs = [(one, two)]
        if one.kind == "table" and len(one.lines) == len(two.lines):
            rows = enumerate(zip(one.lines, two.lines, strict=True))
            pairs = [(Block("row", one.line + n, [left]), Block("row", two.line + n, [right])) for n, (left, right) in rows]
        for left, right in pairs:
            here = f"{place(other, right.line, root)} (English: {place(english, left.line, root)})"
            for what, mine, theirs in (
                ("code", code_of(left), code_of(right)), ("numbers", numbers(left), numbers(right)),
                ("links", links(left, english, root), links(right, other, root, language)),
            ):  # fmt: skip
                if mine != theirs:
                    found.append(f"{here} {what}: English has {less(mine, theirs)}; the translation has {less(theirs, mine)}")
    return found


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("english", ENGLISH, ids=lambda path: path.stem)
def test_in_step(english: Path, language: str) -> None:
    found = differences(english, translated(english, language), language)
    if found:
        pytest.fail("a translation is not in step:\n  " + "\n  ".join(found), pytrace=False)


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("english", ENGLISH, ids=lambda path: path.stem)
def test_it_is_in_its_language(english: Path, language: str) -> None:
    text = translated(english, language).read_text(encoding="utf-8")
    prose = [block for block in blocks(translated(english, language)) if block.kind == "text" and not is_languages(block)]
    assert prose and all(re.search(SCRIPT[language], block.text) or block.text.startswith("!") for block in prose)
    if language == "ar":  # words from right to left, code from left to right: as fences stand outside, so do its lines
        outside = re.sub(r'<div dir="rtl" markdown="1">.*?</div>', "", text, flags=re.DOTALL)
        assert not re.search(SCRIPT["ar"], outside) and outside.count("```") == text.count("```")
        inside = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
        assert [code for code in CODE.findall(inside)] == re.findall(r'<span dir="ltr">`([^`\n]+)`</span>', inside)


@pytest.mark.parametrize("english", ENGLISH, ids=lambda path: path.stem)
def test_languages_lead_to_each_other(english: Path) -> None:
    pages = {None: english} | {language: translated(english, language) for language in LANGUAGES}
    for language, path in pages.items():
        (line,) = [block for block in blocks(path) if is_languages(block)]
        targets = {(path.parent / target).resolve() for target in re.findall(r"\]\(([^)]+)\)", line.text)}
        assert targets >= {other for name, other in pages.items() if name != language}, path


def test_what_is_out_of_step_is_named(tmp_path: Path) -> None:
    one, two = tmp_path / "README.md", tmp_path / "README.it.md"
    right = "# T\n\nSono 4.8 volte, [righe](a.md), `x --y`.\n\n```console\nrun --fast\n```\n"
    one.write_text("# T\n\nIt is 4.8 times, see [rows](a.md), `x --y`.\n\n```console\nrun --fast\n```\n")
    for correct, wrong, said in (
        ("4.8", "4.9", "README.it.md:3 (English: README.md:3) numbers: English has 4.8; the translation has 4.9"),
        ("a.md", "b.md", "links: English has a.md; the translation has b.md"),
        ("--y", "--z", "code: English has x --y"),
        ("--fast", "--slow", "README.it.md:6 (English: README.md:6) code"),
        ("Sono", "## Sono", "README.it.md:3 (English: README.md:3) is ##, in English text"),
        ("\n```console\nrun --fast\n```\n", "", "README.md:5 has no block in its place in README.it.md"),
    ):
        two.write_text(right)
        assert differences(one, two, "it", tmp_path) == []
        two.write_text(right.replace(correct, wrong))
        found = differences(one, two, "it", tmp_path)
        assert any(said in line for line in found), found
