"""The table of a statement on paper: it adds up units of one quota, and never those of several."""

import re

import pytest

from coordinator.usage.rules.paper import Paper, PaperLine, Party, page_of

EXPORTS, MORE_EXPORTS = PaperLine("exports", "Usage, eu-west", 10), PaperLine("exports", "Usage, us-east", 6)
TOKENS = PaperLine("tokens", "Usage, eu-west", 1)


def rows_of(*lines: PaperLine) -> list[list[str]]:
    paper = Paper("Usage statement", [], Party(["Ours"]), Party(["Acme"]), lines, [], [])
    rows = re.findall(r"<tr[^>]*>(<td.*?)</tr>", page_of(paper))
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows]


@pytest.mark.parametrize(
    ("lines", "rows"),
    [
        ([], [["Total", "", "0"]]),
        ([EXPORTS], [["Exports", "Usage, eu-west", "10"], ["Total", "", "10"]]),
        (
            [EXPORTS, MORE_EXPORTS],
            [["Exports", "Usage, eu-west", "10"], ["", "Usage, us-east", "6"], ["Total", "", "16"]],
        ),
        (
            [EXPORTS, MORE_EXPORTS, TOKENS],
            [
                ["Exports", "Usage, eu-west", "10"],
                ["", "Usage, us-east", "6"],
                ["", "Total of Exports", "16"],
                ["Tokens", "Usage, eu-west", "1"],
            ],
        ),
    ],
    ids=["no usage", "one line", "one quota", "two quotas"],
)
def test_each_quota_has_a_total_of_its_own(lines: list[PaperLine], rows: list[list[str]]) -> None:
    assert rows_of(*lines) == rows
