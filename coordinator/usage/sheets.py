"""Return one answer in the requested media type: JSON for programs, CSV for spreadsheets, HTML for print."""

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, TypeVar

import msgspec
from fastapi import Request, Response
from pydantic import Field

from coordinator.http.conditions import strong_tag, unless_known
from coordinator.limits.rules.history import LimitInForce, LimitKind
from coordinator.tenants.operations import Tenant
from coordinator.usage.pdf import NoPdf, TooLargeForPdf, pdf_of
from coordinator.usage.rules.paper import Party
from coordinator.usage.rules.reconciliation import Reconciliation
from coordinator.usage.rules.sheet import Cell, Sheet, csv_file, html_of, xlsx_of
from coordinator.usage.rules.statement import LineAdjustment, MonthStatement, Statement, StatementLine
from coordinator.usage.rules.trial_balance import TrialBalance
from protocol.identifiers import parse_quota_key
from protocol.limits.document import HARD, SOFT, Mode
from web.problems import refused

T = TypeVar("T")
SHEET = "Leasehold"  # the name of the one table of a file


class Shape(StrEnum):
    JSON = "json"
    CSV = "csv"
    XLSX = "xlsx"
    HTML = "html"
    PDF = "pdf"


XLSX_MEDIA = "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet"
PDF_MEDIA = "application/pdf"
MEDIA = {
    Shape.JSON: "application/json",
    Shape.CSV: "text/csv",
    Shape.XLSX: XLSX_MEDIA,
    Shape.HTML: "text/html",
    Shape.PDF: PDF_MEDIA,
}
ShapeParameter = Annotated[
    Shape,
    Field(
        alias="format",
        description="`csv` and `xlsx` are for a spreadsheet, `html` and `pdf` for people.",
        examples=["csv"],
    ),
]
OTHER_MEDIA = ("text/csv", XLSX_MEDIA, "text/html", PDF_MEDIA)  # besides JSON
_NOTHING_FROM_ELSEWHERE = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"


async def shaped(
    request: Request,
    shape: Shape,
    value: T,
    sheet_of: Callable[[T], Sheet],
    name: str,
    *,
    page: Callable[[], str] | None = None,
    is_immutable: bool = False,
) -> Response:
    """Return the value in a shape. `page` makes its page, where that is not simply the sheet."""
    body = await _body(shape, value, sheet_of, page or (lambda: html_of(sheet_of(value))))
    answer = Response(body, media_type=MEDIA[shape])
    if shape in (Shape.CSV, Shape.XLSX, Shape.PDF):
        answer.headers["Content-Disposition"] = f'attachment; filename="{name}.{shape}"'
    if shape is Shape.HTML:
        answer.headers["Content-Security-Policy"] = _NOTHING_FROM_ELSEWHERE
    return unless_known(request, answer, strong_tag(body), is_immutable=is_immutable)


async def _body(shape: Shape, value: T, sheet_of: Callable[[T], Sheet], page: Callable[[], str]) -> bytes:
    match shape:
        case Shape.JSON:
            return msgspec.json.encode(value)
        case Shape.CSV:
            return csv_file(sheet_of(value).in_one_table())
        case Shape.XLSX:
            return xlsx_of([(SHEET, sheet_of(value).in_one_table())])
        case Shape.HTML:
            return page().encode()
        case Shape.PDF:
            return await _pdf(page())


async def _pdf(page: str) -> bytes:
    try:
        return await pdf_of(page)
    except NoPdf:
        reason = "PDF takes weasyprint and Pango, which this coordinator lacks: install leasehold[paper], or use html."
        raise refused("format", "available", reason) from None
    except TooLargeForPdf:
        raise refused("format", "at_most", "This has too many lines for a PDF. Use csv or xlsx.") from None


# --- the sheets -------------------------------------------------------------------------------------------------------


def external_ids_of(tenant: Tenant | None) -> str:
    return ", ".join(f"{system}={id_}" for system, id_ in (tenant.external_ids if tenant else {}).items())


def statement_sheet(statement: Statement, tenant: Tenant | None) -> Sheet:
    of: dict[str, Cell] = {
        "tenant": statement.tenant,
        "name": tenant.name if tenant else None,
        "external ids": external_ids_of(tenant),
        "period": statement.period,
        "as of": statement.as_of,
        "is final": str(statement.is_final).lower(),
    }
    facts: dict[str, Cell] = {
        "tenant": statement.tenant,
        "from": statement.starts_at,
        "to": statement.ends_at,
        "state": "final" if statement.is_final else "preliminary: what is reported since is not in it",
        "ledger position": statement.as_of,
        "root of the period": statement.root,
        "units billed": statement.billed,
        "not accounted for yet": statement.unaccounted,
        "statement": statement.id,
    }
    columns = ("line", "kind", "quota", "used in", "region", "units", "adjusted", "document", "reason")
    rows = [(*_facts_of(each), *_of_adjustment(each.adjustment)) for each in statement.lines]
    limits = [_limit(each) for each in statement.limits]
    also = Sheet("Limits in force", {}, _OF_LIMITS, limits)
    return Sheet(f"Statement {statement.period}: {statement.tenant}", facts, columns, rows, also, of)


def month_sheet(statement: MonthStatement, tenant: Tenant | None) -> Sheet:
    of: dict[str, Cell] = {
        "tenant": statement.tenant,
        "name": tenant.name if tenant else None,
        "external ids": external_ids_of(tenant),
        "month": statement.month,
        "as of": statement.as_of,
        "is final": str(statement.is_final).lower(),
    }
    columns = ("line", "kind", "quota", "units", "adjusted", "document", "reason")
    rows = [(each.n, each.kind, each.quota, each.units, *_of_adjustment(each.adjustment)) for each in statement.lines]
    return Sheet(f"Statement {statement.month}: {statement.tenant}", {}, columns, rows, of=of)


def seller_of(setting: str) -> Party:
    return Party([line.strip() for line in setting.split("|")] if setting else [])


def customer_of(name: str, tenant: Tenant | None) -> Party:
    """Return the customer as paper shows it: a tenant of which nothing is registered by its own name."""
    if tenant is None:
        return Party([name])
    ids = [f"Customer {name}", *(f"{system}: {id_}" for system, id_ in tenant.external_ids.items())]
    return Party([tenant.name, *tenant.address], ids)


# Limits get a column of their own, so that the sum of the column `units` stays what is billed.
_OF_LIMITS = ("kind", "quota", "limit", "of", "beyond it", "from", "to", "plan", "document", "reason")


def _limit(limit: LimitInForce) -> tuple[Cell, ...]:
    kind = "limit" if limit.kind in (LimitKind.PLAN, LimitKind.OVERRIDE) else "limit, added"
    reason = f"limits document {limit.version}" if limit.version else f"{limit.kind}: {limit.reason}"
    how = _whose(limit), beyond(limit.cap)
    times = limit.starts_at, limit.ends_at
    return kind, limit.quota_key, limit.units, *how, *times, limit.plan, limit.document, reason


def _whose(limit: LimitInForce) -> str | None:
    if limit.mode is None:
        return None  # it extends another limit
    tenants = "" if "tenant" in parse_quota_key(limit.quota_key)[1] else "all tenants together, "
    return tenants + ("each region for itself" if limit.mode == Mode.REGIONAL else "all regions together")


def beyond(cap: str | dict[str, int] | None) -> str | None:
    """Describe for people what can be used beyond a limit."""
    if isinstance(cap, dict):
        return ", ".join(f"{units} {_BEYOND[name]}" for name, units in cap.items())
    return {SOFT: "any number, billed as overage", HARD: "nothing"}.get(cap or "")


_BEYOND = {"overage": "billed as overage", "overdraft": "in regions that are cut off"}


def _facts_of(line: StatementLine) -> tuple[Cell, ...]:
    return line.n, line.kind, line.quota, line.charge_period, line.region, line.units


def _of_adjustment(adjustment: LineAdjustment | None) -> tuple[Cell, ...]:
    return (adjustment.units, adjustment.document, adjustment.reason) if adjustment else (None, None, None)


def trial_balance_sheet(balance: TrialBalance) -> Sheet:
    facts: dict[str, Cell] = {"status": balance.status.value, "sources": balance.sources, "uses": balance.uses}
    columns = ("account", "transfers", "pools", "leases", "regions")
    rows = [(each.account, each.transfers, each.pools, each.leases, each.regions) for each in balance.accounts]
    of: dict[str, Cell] = {"period": balance.period, "status": balance.status.value}
    return Sheet(f"Trial balance {balance.period}", facts, columns, rows, of=of)


_OF_REGION = ("granted", "consumed", "returned", "outstanding", "suspense", "written_off", "overage", "corrected")


def reconciliation_sheet(found: Reconciliation) -> Sheet:
    faults = {f"fault {n}": f"{each.kind}: {each.quota_key}: {each.reason}" for n, each in enumerate(found.findings, 1)}
    anomalies = {
        f"anomaly {n}": f"{each.kind}: {each.quota_key}: {each.units} units: {each.reason}"
        for n, each in enumerate(found.anomalies, 1)
    }
    facts: dict[str, Cell] = {"status": found.status.value, "state": found.state, "drift": found.drift}
    facts |= faults | anomalies
    columns = ("quota", "region", *_OF_REGION, "region's own total", "drift", "gaps", "chain")
    rows = [
        (
            quota.quota_key,
            region.region,
            *(getattr(region, name) for name in _OF_REGION),
            *(region.region_total, region.drift, region.gaps, region.chain.value),
        )
        for quota in found.quotas
        for region in quota.regions
    ]
    of: dict[str, Cell] = {"period": found.period, "status": found.status.value, "state": found.state}
    return Sheet(f"Reconciliation {found.period}", facts, columns, rows, of=of)
