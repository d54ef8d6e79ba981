"""`leasehold decisions` sums up in sentences: how many were denied and why, how many admitted, and what was lost."""

from typing import Any

from leasehold.cli.deciding.decisions import sentences_of

NONE = {"denied": 0, "shadow_denied": 0, "admitted": 0, "admitted_plus_minus": 0, "lost": 0, "kept_from": None}


def group(decisions: int, outcome: str = "denied", reason: str | None = "limit", **fields: Any) -> dict[str, Any]:
    return {
        "outcome": outcome,
        "policy": "export",
        "quota": "exports",
        "reason": reason,
        "decisions": decisions,
    } | fields


def test_nothing_denied_is_said() -> None:
    assert sentences_of(NONE | {"groups": []}, "acme") == ["0 denied of acme."]


def test_reasons_estimates_and_losses_are_named() -> None:
    groups = [group(1_200), group(30, reason="blocked", policy=None, quota=None)]
    groups += [group(9, "shadow_denied", policy="trial"), group(40_000, "admitted", None)]
    summary = {"denied": 1_230, "shadow_denied": 9, "admitted": 40_000, "admitted_plus_minus": 900, "lost": 17}
    assert sentences_of(NONE | summary | {"groups": groups}, None) == [
        "1,230 denied: 1,200 limit (policy export, quota exports), 30 blocked.",
        "9 admitted that a shadow policy would have denied: 9 limit (policy trial, quota exports).",
        "About 40,000 (± 900) admitted, by the sample.",
        "17 decisions of these minutes, of any tenant, were lost.",
    ]


def test_rare_reasons_are_added_up() -> None:
    groups = [group(10 - number, policy=f"p{number}") for number in range(8)]
    [said] = sentences_of(NONE | {"denied": 52, "groups": groups}, None)
    assert said.endswith("6 limit (policy p4, quota exports), 12 others.")
