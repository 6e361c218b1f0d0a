"""`docs/field-cases.md` and the tests that carry the number of a case name each other."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "field-cases.md"
NAMED = re.compile(r"\btest((?:_p\d\d)+)_\w+")


def cases_of(test: str) -> set[str]:
    """As in `test_p13_p15_...`."""
    found = NAMED.fullmatch(test)
    assert found is not None
    return {case.upper() for case in found[1].split("_")[1:]}


def rows() -> list[tuple[str, str, str]]:
    """(case, what ebbtide does, tests or why not)."""
    found = []
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        if line.startswith("| P"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert len(cells) == 3, line
            case, title = cells[0].split(maxsplit=1)
            assert title
            found.append((case, cells[1], cells[2]))
    return found


def defined_in_the_tree() -> dict[str, set[str]]:
    """By case."""
    found = defaultdict(set)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for line in path.read_text(encoding="utf-8").splitlines():
            defined = re.match(r"(?:async )?def (test_p\d\d_\w+)", line)
            for case in cases_of(defined[1]) if defined else ():
                found[case].add(defined[1])  # type: ignore[index]  # there is one
    return found


def test_every_case_has_tests_or_a_reason() -> None:
    numbers = [case for case, _, _ in rows()]
    assert len(numbers) > 50
    assert numbers == sorted(set(numbers))
    for case, does, shown in rows():
        assert re.fullmatch(r"P\d\d", case)
        assert does.endswith((".", ")")), case
        assert NAMED.search(shown) or len(shown.split()) > 3, case


def test_the_document_and_the_tests_name_each_other() -> None:
    listed = {case: {name[0] for name in NAMED.finditer(shown)} for case, _, shown in rows()}
    assert {case: names for case, names in listed.items() if names} == defined_in_the_tree()
