"""Make PDFs of pages, in a thread and one at a time: 200 lines take most of a second of a processor."""

import asyncio
from importlib import import_module
from typing import NoReturn

_ONE_AT_A_TIME = asyncio.Semaphore(1)
MOST_BYTES = 100_000  # of HTML, about 1,400 lines and 5 s: the time is in proportion to the length


class NoPdf(Exception):
    """No PDF can be made here. The message says why, and what to do."""


class TooLargeForPdf(Exception):
    """The page would take too long."""


async def pdf_of(page: str) -> bytes:
    """Return the page as PDF, the same bytes for the same page. Raises NoPdf and TooLargeForPdf."""
    if len(page) > MOST_BYTES:
        raise TooLargeForPdf
    async with _ONE_AT_A_TIME:
        return await asyncio.to_thread(_render, page)


def _render(page: str) -> bytes:
    try:
        weasyprint = import_module("weasyprint")
    except (ImportError, OSError) as error:  # the package, or a library of the system that it loads
        raise NoPdf from error
    document = weasyprint.HTML(string=page, url_fetcher=_fetch_nothing)
    pdf: bytes = document.write_pdf(pdf_identifier=b"leasehold")
    return pdf


def _fetch_nothing(url: str, **_: object) -> NoReturn:
    raise ValueError(f"a page may not load {url}")
