"""Architecture decision records have one form, and the index lists every number, as a record or as withdrawn."""

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "adr"
RECORDS = sorted(FOLDER.glob("[0-9]*.md"))
GIVEN_OUT = range(89, 123)  # to records that are written at the same time, and that may not all come about
SECTIONS = ["## Context", "## Decision", "## Consequences", "## Rejected alternatives"]
_HEAD = re.compile(
    r"# (\d+)\. (.+)\n\n\* \*\*Status:\*\* ((?:Proposed|Accepted|Superseded).*)\n\* \*\*Date:\*\* \d{4}-\d\d-\d\d"
    r"\n\n## Context\n"
)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.stem[:4])
def test_a_record_has_the_form_of_all(record: Path) -> None:
    text = record.read_text(encoding="utf-8")
    head = _HEAD.match(text)
    assert head, "number and title, status, date, and the context first"
    assert int(head[1]) == int(record.stem[:4])
    assert re.findall(r"^## .*$", text, re.MULTILINE) == SECTIONS


def test_the_index_lists_every_number() -> None:
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    titles = {record.stem[:4]: record.read_text(encoding="utf-8").split("\n", 1)[0] for record in RECORDS}
    for number in range(1, int(max(titles)) + 1):
        name = f"{number:04}"
        if name in titles:
            title = titles[name].partition(". ")[2]
            assert f"| {number} | [{title}]({name}" in index, title
        elif number not in GIVEN_OUT:
            assert re.search(rf"^\| {number} \| withdrawn", index, re.MULTILINE), (
                f"{name} is neither there nor withdrawn"
            )
