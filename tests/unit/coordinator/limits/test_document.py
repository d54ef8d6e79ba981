"""Valid documents are parsed, and invalid ones are refused with each fault and its place."""

import msgspec
import pytest

from coordinator.limits.document import MAX_DOCUMENT_BYTES, YAML, read_document, write_yaml
from protocol.limits.document import (
    AllowanceQuota,
    LimitsDocument,
    PeriodKind,
    Portion,
    StoreFailure,
    carried_over,
    extension_of,
    horizon_of,
    limit_of,
    overdraft_of,
    report_within_ms_of,
    thresholds_of,
)
from protocol.units import MAX_UNITS
from web.bodies import JSON
from web.problems import Problem

GOOD = """\
plans:
  free: {}
  pro: {}
default_plan: free
quotas:
  - name: exports
    kind: allowance
    limit: {free: 1000, pro: 100000}
    period: month
  - name: api
    kind: rate
    limit: "100/second, burst 200"
policies:
  - name: search
    match: {route: "/v1/search*", method: [GET, POST]}
    by: [tenant]
    quota: api
    cost: 5
    on_store_failure: open
  - name: export
    match: {route: "/v1/exports", method: POST}
    by: [tenant]
    quota: exports
"""


def read(text: str | bytes, media_type: str = YAML) -> LimitsDocument:
    return read_document(text.encode() if isinstance(text, str) else text, media_type)


def allowance_of(document: LimitsDocument) -> AllowanceQuota:
    quota = document.quotas[0]
    assert isinstance(quota, AllowanceQuota)
    return quota


def problem_of(text: str | bytes, media_type: str = YAML) -> Problem:
    with pytest.raises(Problem) as refused:
        read(text, media_type)
    return refused.value


def faults(text: str | bytes, media_type: str = YAML) -> list[tuple[str, str]]:
    return [(fault.field, fault.rule) for fault in problem_of(text, media_type).invalid_parameters]


def test_the_same_document_in_both_languages() -> None:
    document = read(GOOD)
    assert document.policies[0].on_store_failure is StoreFailure.OPEN
    assert read(msgspec.json.encode(document), JSON) == document
    assert read(write_yaml(msgspec.to_builtins(document))) == document


def test_all_faults_are_named_with_field_and_place() -> None:
    text = (
        GOOD.replace("free: 1000", "gold: -5").replace("quota: api", "quota: apis").replace("100/second", "100/parsec")
    )
    problem = problem_of(text)
    assert (problem.status, [(fault.field, fault.rule) for fault in problem.invalid_parameters]) == (
        422,
        [
            ("quotas[0].limit.gold", "known"),
            ("quotas[0].limit.gold", "units"),
            ("quotas[0].limit", "plans"),
            ("quotas[1].limit", "rate"),
            ("policies[0].quota", "known"),
        ],
    )
    places = [fault.reason.rpartition(" (")[2] for fault in problem.invalid_parameters]
    assert places == [
        "line 8, column 19)",
        "line 8, column 19)",
        "line 8, column 12)",
        "line 12, column 12)",
        "line 17, column 12)",
    ]


def test_json_has_places_too() -> None:
    (fault,) = problem_of('{"plans": {},\n "default_plan": "gold"}', JSON).invalid_parameters
    assert (fault.field, fault.rule) == ("default_plan", "known")
    assert fault.reason.endswith("(line 2, column 18)")


def test_invalid_json_has_a_place_too() -> None:
    assert "(line 2, column 11)" in problem_of('{"plans": {},\n "quotas" 7}', JSON).detail


def test_a_central_quota_may_have_a_soft_cap_and_a_longer_wait() -> None:
    document = read(
        "quotas: [{name: a, kind: allowance, limit: 5, period: day, mode: central, cap: soft}]\n"
        "policies: [{name: p, quota: a, by: [tenant], wait: 9s}]"
    )
    quota = allowance_of(document)
    assert (quota.mode, quota.cap, document.policies[0].wait) == ("central", "soft", "9s")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "quotas: [{nam: a}]",
            [
                ("quotas[0].kind", "required"),
                ("quotas[0].nam", "unknown"),
                ("quotas[0].name", "required"),
                ("quotas[0].limit", "required"),
            ],
        ),
        (
            "quotas: [{name: a, kind: rate, limit: 5/second, sharng: x}, {name: 7, kind: rats, limit: []}]\nplan: {}",
            [
                ("plan", "unknown"),
                ("quotas[0].sharng", "unknown"),
                ("quotas[1].kind", "enum"),
                ("quotas[1].name", "type"),
                ("quotas[1].limit", "type"),
            ],
        ),
        (
            "plans: {free: {}, pro: {}}\nquotas: [{name: a, kind: rate, limit: {free: 5/second}}]\n"
            "policies: [{name: p, quota: a, by: [tenant]}]",
            [("quotas[0].limit", "plans")],
        ),
        (
            "quotas: [{name: a, kind: allowance, limit: 5, period: fortnight, mode: shared},\n"
            "  {name: b, kind: allowance, limit: 5}, {name: c, kind: concurrency, limit: 5, sharing: even},\n"
            "  {name: d, kind: rate, limit: 5/second, algorithm: roulette, sharing: even}]",
            [
                ("quotas[0].period", "enum"),
                ("quotas[0].mode", "enum"),
                ("quotas[1].period", "required"),
                ("quotas[2].sharing", "enum"),
                ("quotas[3].algorithm", "enum"),
                ("quotas[3].sharing", "enum"),
            ],
        ),
        ("quotas: 7", [("quotas", "type")]),
        ("quotas: [{name: a, kind: allowance, limit: 5, period: year}]", [("quotas[0].period", "enum")]),
        (
            "quotas: [{name: a, kind: allowance, limit: 5, period: day, time_zone: Berlin}]",
            [("quotas[0].time_zone", "zone")],
        ),
        (
            "quotas: [{name: a, kind: allowance, limit: 5, period: anniversary}]\n"
            "policies: [{name: p, quota: a, by: [user]}]",
            [("policies[0].by", "tenant")],
        ),
        ("quotas: [{name: a, kind: allowance, limit: 5, period: day, mode: shared}]", [("quotas[0].mode", "enum")]),
        ("quotas: [{name: a, kind: rate, limit: 5/second, mode: central}]", [("quotas[0].mode", "unknown")]),
        ("quotas: [{name: a, kind: concurrency, limit: 5, mode: regional}]", [("quotas[0].mode", "unknown")]),
        (
            "quotas: [{name: a, kind: allowance, limit: 5, period: day, mode: regional, cap: soft}]",
            [("quotas[0].mode", "cap")],
        ),
        (
            "quotas: [{name: a, kind: allowance, limit: 5, period: day, mode: regional, carry_over: all}]",
            [("quotas[0].mode", "carry_over")],
        ),
        (
            "quotas: [{name: a, kind: allowance, limit: 5, period: day, mode: central, horizon: 1s}]",
            [("quotas[0].mode", "horizon")],
        ),
        (
            "quotas: [{name: a, kind: allowance, limit: 5, period: day, mode: central}]\n"
            "policies: [{name: p, quota: a, by: [tenant], wait: 0s}, {name: q, quota: a, by: [tenant], wait: 11s},\n"
            "  {name: r, quota: a, by: [tenant], on_store_failure: open},\n"
            "  {name: s, quota: a, by: [tenant], on_store_failure: local}]",
            [
                ("policies[0].wait", "range"),
                ("policies[1].wait", "range"),
                ("policies[2].on_store_failure", "supported"),
                ("policies[3].on_store_failure", "supported"),
            ],
        ),
        (
            "quotas: [{name: a, kind: allowance, limit: 5, period: day, report_within: soon}]",
            [("quotas[0].report_within", "duration")],
        ),
        (
            "quotas: [{name: a, kind: allowance, limit: 5, period: day, report_within: 99ms}]",
            [("quotas[0].report_within", "range")],
        ),
        (
            "quotas: [{name: a, kind: allowance, limit: 5, period: day, report_within: 2h}]",
            [("quotas[0].report_within", "range")],
        ),
        (
            "quotas: [{name: a, kind: rate, limit: 5/second, report_within: 1s}]",
            [("quotas[0].report_within", "unknown")],
        ),
        ("quotas: [{name: a, kind: concurrency, limit: 5, slot_ttl: soon}]", [("quotas[0].slot_ttl", "duration")]),
        ("quotas: [{name: a, kind: concurrency, limit: 5, slot_ttl: 500ms}]", [("quotas[0].slot_ttl", "range")]),
        ("quotas: [{name: a, kind: concurrency, limit: 5, slot_ttl: 2d}]", [("quotas[0].slot_ttl", "range")]),
        ("quotas: [{name: a, kind: concurrency, limit: 10001}]", [("quotas[0].limit", "units")]),
        ("[]", [("body", "type")]),
        ("quotas: [{name: a, kind: allowance, limit: 1.5, period: day}]", [("quotas[0].limit", "type")]),
        ("quotas: [{name: a, kind: allowance, limit: yes, period: day}]", [("quotas[0].limit", "type")]),
        ("quotas: [{name: a, kind: allowance, limit: 9007199254740992, period: day}]", [("quotas[0].limit", "units")]),
        ("quotas: [{name: A, kind: allowance, limit: 1, period: day}]", [("quotas[0].name", "pattern")]),
        ('quotas: [{name: "a\\n", kind: allowance, limit: 1, period: day}]', [("quotas[0].name", "text")]),
    ],
)
def test_each_faulty_document_has_its_one_fault_named(text: str, expected: list[tuple[str, str]]) -> None:
    assert faults(text) == expected


@pytest.mark.parametrize(
    ("change", "to", "expected"),
    [
        ("by: [tenant]", "by: [tenant, tenant]", ("policies[0].by[1]", "unique")),
        ("by: [tenant]", "by: [color]", ("policies[0].by[0]", "known")),
        ("by: [tenant]", "by: [labels.Model]", ("policies[0].by[0]", "known")),
        ("by: [tenant]", "by: [labels.]", ("policies[0].by[0]", "known")),
        ("by: [tenant]", "by: [labels.model, labels.model]", ("policies[0].by[1]", "unique")),
        ("by: [tenant]", f"by: [{', '.join(f'labels.l{n}' for n in range(10))}]", ("policies[0].by", "max_length")),
        ("cost: 5", "usage_by: [route_class]", ("policies[0].usage_by", "allowance")),
        ("quota: api", "quota: exports\n    usage_by: [ip]", ("policies[0].usage_by[0]", "known")),
        ("quota: api", "quota: exports\n    usage_by: [labels.Model]", ("policies[0].usage_by[0]", "known")),
        (
            "quota: api",
            "quota: exports\n    usage_by: [labels.a, labels.b, labels.c, labels.d, labels.e]",
            ("policies[0].usage_by", "max_length"),
        ),
        (
            "quota: api",
            "quota: exports\n    usage_by: [api_key, api_key]",
            ("policies[0].usage_by[1]", "unique"),
        ),
        ("method: [GET, POST]", "method: [GET, po st]", ("policies[0].match.method", "method")),
        ("method: [GET, POST]", "method: [GET, '*']", ("policies[0].match.method", "method")),
        ("method: [GET, POST]", "method: []", ("policies[0].match.method", "required")),
        ('route: "/v1/search*"', 'route: "/v1/se*ch"', ("policies[0].match.route", "wildcard")),
        ('route: "/v1/search*"', 'route: "/v1/*.pdf"', ("policies[0].match.route", "wildcard")),
        ('route: "/v1/search*"', 'route: "/v1/**"', ("policies[0].match.route", "wildcard")),
        ('route: "/v1/search*"', 'route: "/*/*/*/*/*"', ("policies[0].match.route", "wildcard")),
        ('route: "/v1/search*"', "route: search", ("policies[0].match.route", "path")),
        ('route: "/v1/search*"', "route: /v1/search?q", ("policies[0].match.route", "query")),
        ('route: "/v1/search*"', "route: /v1/../search", ("policies[0].match.route", "segments")),
        ('route: "/v1/search*"', "route: /*/%2E%2e/search", ("policies[0].match.route", "segments")),
        ("plans:", "routes: {trailing_slash: drop}\nplans:", ("routes.trailing_slash", "enum")),
        ("plans:", "routes: {slashes: merge}\nplans:", ("routes.slashes", "unknown")),
        ("plans:", "unmatched: refuse\nplans:", ("unmatched", "enum")),
        ("plans:", "examples: [{subject: {color: red}}]\nplans:", ("examples[0].subject.color", "unknown")),
        ('route: "/v1/search*"', "route_class: heavy", ("policies[0].match.route_class", "known")),
        ('route: "/v1/search*"', "route_class: []", ("policies[0].match.route_class", "required")),
        ('route: "/v1/search*"', "ip: 10.0.0.1/8", ("policies[0].match.ip", "network")),
        ('route: "/v1/search*"', "labels: {Model: large}", ("policies[0].match.labels.Model", "name")),
        ('route: "/v1/search*"', "labels: {model: []}", ("policies[0].match.labels.model", "min_length")),
        ('route: "/v1/search*"', "labels: {model: 7}", ("policies[0].match.labels.model", "type")),
        ('route: "/v1/search*"', "labels: {model: ''}", ("policies[0].match.labels.model", "length")),
        (
            'route: "/v1/search*"',
            f"labels: {{model: [a, {'x' * 257}]}}",
            ("policies[0].match.labels.model[1]", "length"),
        ),
        (
            'route: "/v1/search*"',
            f"labels: {{{', '.join(f'l{n}: x' for n in range(17))}}}",
            ("policies[0].match.labels", "max_length"),
        ),
        ('route: "/v1/search*"', "ip: [10.0.0.0/8, here]", ("policies[0].match.ip[1]", "network")),
        ("cost: 5", "cost: {heavy: 5}", ("policies[0].cost.heavy", "known")),
        ("cost: 5", "cost: heavy", ("policies[0].cost", "known")),
        ("cost: 5", "cost: 0", ("policies[0].cost", "minimum")),
        ("cost: 5", "ip_prefix: {ipv6: 129}", ("policies[0].ip_prefix.ipv6", "maximum")),
        ("by: [tenant]\n    quota: exports", "by: [api_key]\n    quota: exports", ("policies[1].by", "tenant")),
        ("plans:", "route_classes: {Heavy: [{route: /a}]}\nplans:", ("route_classes.Heavy", "name")),
        ("plans:", "route_classes: {heavy: [{route: a}]}\nplans:", ("route_classes.heavy[0].route", "path")),
        ("plans:", "route_classes: {heavy: [{method: g t}]}\nplans:", ("route_classes.heavy[0].method", "method")),
        ("plans:", "route_classes: {heavy: []}\nplans:", ("route_classes.heavy", "required")),
        (
            "plans:",
            "envoy: {domains: {edge: {entries: {x-org: plan}}}}\nplans:",
            ("envoy.domains.edge.entries.x-org", "known"),
        ),
        ("plans:", "envoy: {domains: {'': {}}}\nplans:", ("envoy.domains.", "length")),
        (
            "plans:",
            "envoy: {domains: {edge: {entries: {'': user}}}}\nplans:",
            ("envoy.domains.edge.entries", "required"),
        ),
        ("plans:", "envoy: {domains: {edge: {headers: no}}}\nplans:", ("envoy.domains.edge.headers", "unknown")),
        ("plans:", "cost_tables: {plain: {heavy: 2}}\nplans:", ("cost_tables.plain.heavy", "known")),
    ],
)
def test_a_policy_that_would_limit_nothing_is_refused(change: str, to: str, expected: tuple[str, str]) -> None:
    assert expected in faults(GOOD.replace(change, to))


@pytest.mark.parametrize(
    ("thresholds", "expected"),
    [
        ("[80%, 50%]", [("quotas[0].thresholds[1]", "ascending")]),
        ("[80%, 80%]", [("quotas[0].thresholds[1]", "ascending")]),
        ("[900, 90]", [("quotas[0].thresholds[1]", "ascending")]),
        ("[50%, 900]", [("quotas[0].thresholds[1]", "mixed")]),
        ("[0%, 50%]", [("quotas[0].thresholds[0]", "portion")]),
        ("[50%, 1001%]", [("quotas[0].thresholds[1]", "portion")]),
        ("[0]", [("quotas[0].thresholds[0]", "portion")]),
        ("[half]", [("quotas[0].thresholds[0]", "portion")]),
        ("[9007199254740992]", [("quotas[0].thresholds[0]", "portion")]),
        (str([f"{n}%" for n in range(1, 22)]), [("quotas[0].thresholds", "max_length")]),
        ("50%", [("quotas[0].thresholds", "type")]),
    ],
)
def test_invalid_thresholds_are_refused(thresholds: str, expected: list[tuple[str, str]]) -> None:
    assert faults(GOOD.replace("period: month", f"period: month\n    thresholds: {thresholds}")) == expected


@pytest.mark.parametrize(
    ("cap", "field", "rule"),
    [
        ("firm", "quotas[0].cap", "known"),
        ("{}", "quotas[0].cap", "known"),
        ("{overage: 5, more: 7}", "quotas[0].cap", "known"),
        ("{overage: 5, overdraft: -7}", "quotas[0].cap.overdraft", "units"),
        ("{overdraft: 7, underdraft: 1}", "quotas[0].cap", "known"),
        ("{overage: -1}", "quotas[0].cap.overage", "units"),
        ("{overage: 9007199254740992}", "quotas[0].cap.overage", "units"),
        ("7", "quotas[0].cap", "type"),
    ],
)
def test_an_invalid_cap_is_refused(cap: str, field: str, rule: str) -> None:
    assert faults(GOOD.replace("period: month", f"period: month\n    cap: {cap}")) == [(field, rule)]


@pytest.mark.parametrize(
    ("cap", "units", "overdraft"),
    [("hard", 0, 0), ("soft", 2**53 - 1, 0), ("{overage: 500}", 500, 0), ("{overage: 5, overdraft: 7}", 5, 7)],
)
def test_a_soft_cap_extends_the_limit(cap: str, units: int, overdraft: int) -> None:
    quota = allowance_of(read(GOOD.replace("period: month", f"period: month\n    cap: {cap}")))
    assert (extension_of(quota), overdraft_of(quota)) == (units, overdraft)


def test_only_an_allowance_may_have_a_soft_cap() -> None:
    assert faults(GOOD.replace("kind: rate", "kind: rate\n    cap: soft")) == [("quotas[1].cap", "unknown")]


def test_thresholds_are_those_of_the_document_in_its_order() -> None:
    for text, expected in (
        ("[80%, 100%, 120%]", [Portion(percent=80), Portion(percent=100), Portion(percent=120)]),
        ("[10, 900]", [Portion(units=10), Portion(units=900)]),
        ("[]", []),
    ):
        document = read(GOOD.replace("period: month", f"period: month\n    thresholds: {text}"))
        assert thresholds_of(allowance_of(document)) == expected
        assert read(write_yaml(msgspec.to_builtins(document))) == document
    assert [each.percent for each in thresholds_of(allowance_of(read(GOOD)))] == [50, 80, 100]


def test_only_an_allowance_may_have_thresholds() -> None:
    assert faults(GOOD.replace("kind: rate", "kind: rate\n    thresholds: [50%]")) == [
        ("quotas[1].thresholds", "unknown")
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing",
        "quotas: [",
        "\tquotas: []",
        "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]",  # a small entity-expansion bomb
        "quotas: &q []",
        "[" * 10_000,
        "{a: " * 20 + "1" + "}" * 20,
        "plans: {}\nplans: {}",
        "plans: {free: {}, free: {}}",
        "1: x",
        "? [a]\n: x",
        "plans: !!python/object/apply:os.getcwd []",
        "plans: !!set {a}",
        "default_plan: 2026-13-45",
        "default_plan: 9" + "9" * 5000,
        "--- {}\n--- {}",
        "plans: \0",
        b"plans: \xff",
        '"\\ud800": 1',
    ],
)
def test_an_unparseable_document_is_refused_without_a_traceback(text: str | bytes) -> None:
    assert problem_of(text).status in (400, 422)


@pytest.mark.parametrize("text", ["", "{", "nul", '{"plans": {}, "plans": {}}', b'{"plans": "\xff"}', "[" * 100_000])
def test_unparseable_json_is_refused_too(text: str | bytes) -> None:
    assert problem_of(text, JSON).status in (400, 422)


@pytest.mark.parametrize("text", ["a\\u0000b", "a\\u001bb", "a\\u2028b"])
def test_text_unfit_for_the_database_or_a_terminal_is_refused(text: str) -> None:
    policy = '{"name": "p", "quota": "q", "by": ["tenant"], "match": {"route": "/TEXT"}}'.replace("TEXT", text)
    quota = '{"name": "q", "kind": "rate", "limit": "1/second"}'
    (fault,) = problem_of(f'{{"quotas": [{quota}], "policies": [{policy}]}}', JSON).invalid_parameters
    assert fault.rule in ("text", "characters")


def test_size_is_bounded() -> None:
    assert problem_of("# " + "x" * MAX_DOCUMENT_BYTES).status == 413


def test_too_many_values_are_refused_before_they_are_built() -> None:
    assert "too many values" in problem_of("a: [" + "1," * 600_000 + "]").invalid_parameters[0].reason


def test_quotations_from_a_document_are_bounded() -> None:
    (fault,) = problem_of("quotas: [{name: a, kind: rate, limit: " + "x" * 100_000 + "}]").invalid_parameters
    assert len(fault.reason) < 400


def test_many_faults_are_counted_and_the_first_ones_named() -> None:
    problem = problem_of("quotas: [" + "{name: a, kind: rate, limit: x}, " * 200 + "]")
    assert len(problem.invalid_parameters) == 100
    assert problem.detail == "the document has 399 faults; the first 100 are named"
    assert problem_of("quotas: [{name: a, kind: rate, limit: x}]").detail == "the document has 1 fault"


@pytest.mark.parametrize(
    ("value", "field", "rule"),
    [
        ("-1", "quotas[0].carry_over", "portion"),
        ("some", "quotas[0].carry_over", "portion"),
        ("0%", "quotas[0].carry_over", "portion"),
        ("{gold: 5}", "quotas[0].carry_over.gold", "known"),
    ],
)
def test_carry_over_is_a_portion_of_the_limit(value: str, field: str, rule: str) -> None:
    assert faults(GOOD.replace("period: month", f"period: month\n    carry_over: {value}")) == [(field, rule)]


def test_only_an_allowance_may_carry_over() -> None:
    assert faults(GOOD.replace("kind: rate", "kind: rate\n    carry_over: all")) == [
        ("quotas[1].carry_over", "unknown")
    ]


@pytest.mark.parametrize(("value", "units"), [("all", MAX_UNITS), ("50%", 500), ("7", 7), ("0", 0)])
def test_the_amount_of_carry_over(value: str, units: int) -> None:
    quota = allowance_of(read(GOOD.replace("period: month", f"period: month\n    carry_over: {value}")))
    assert carried_over(quota, None, 1000) == units


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("written", "limit"), [("1000", 1000), ("1_000_000", 1_000_000), ("+7", 7), ("010", 10)])
def test_numbers_are_parsed(written: str, limit: int) -> None:
    document = read(f"quotas: [{{name: exports, kind: allowance, limit: {written}, period: month}}]")
    assert document.quotas[0].limit == limit


@pytest.mark.parametrize("written", ["1:59:59", "12:30", "0x10", "0o10", ".inf", "1e400", "9" * 400, "!!int 1:59"])
def test_text_that_is_not_a_number_is_refused(written: str) -> None:
    assert problem_of(f"quotas: [{{name: exports, kind: allowance, limit: {written}, period: month}}]")


def test_numbers_in_base_sixty_are_text() -> None:
    """YAML 1.1 parses such text as an integer in quadratic time: this one took it ten seconds."""
    assert ("quotas", "type") in faults("quotas: 1" + ":59" * 200_000)


def test_fractions_are_parsed() -> None:
    text = GOOD.replace("on_store_failure: open", "on_store_failure: local\n    local_fraction: 0.25")
    assert read(text).policies[0].local_fraction == 0.25


@pytest.mark.parametrize(
    ("period", "horizon", "expected"),
    [
        (PeriodKind.HOUR, "auto", (10_000, 120_000)),
        (PeriodKind.DAY, "auto", (60_000, 120_000)),
        (PeriodKind.MONTH, "auto", (120_000, 120_000)),
        (PeriodKind.ANNIVERSARY, "auto", (120_000, 120_000)),
        (PeriodKind.HOUR, "120s", (120_000, 120_000)),
        (PeriodKind.HOUR, "5s", (5_000, 5_000)),
        (PeriodKind.MONTH, "0s", (0, 0)),
    ],
)
def test_the_horizon_follows_the_period_unless_the_quota_sets_it(
    period: PeriodKind, horizon: str, expected: tuple[int, int]
) -> None:
    quota = AllowanceQuota(name="units", limit=1, period=period, horizon=horizon)
    assert horizon_of(quota) == expected


@pytest.mark.parametrize(("text", "expected_ms"), [("auto", None), ("100ms", 100), ("1h", 3_600_000)])
def test_a_quota_may_set_how_long_usage_waits_for_its_report(text: str, expected_ms: int | None) -> None:
    document = read(f"quotas: [{{name: a, kind: allowance, limit: 5, period: day, report_within: {text}}}]")
    quota = document.quotas[0]
    assert isinstance(quota, AllowanceQuota)
    assert report_within_ms_of(quota) == expected_ms


def test_a_limit_by_plan_may_have_one_for_all_other_plans() -> None:
    document = read(
        "plans: {free: {}, pro: {}}\nquotas: [{name: a, kind: rate, limit: {free: 5/second, '*': 9/second}}]\n"
        "policies: [{name: p, quota: a, by: [tenant]}]"
    )
    [quota] = document.quotas
    assert [limit_of(quota, plan) for plan in ("free", "pro", "unheard-of", None)] == ["5/second", *["9/second"] * 3]
