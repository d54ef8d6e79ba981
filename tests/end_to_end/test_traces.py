"""Small traces of `./dev bench allocation-wan` on real processes, with the promises that hold on any machine."""

import pytest

from benchmarks.allocation import wan
from benchmarks.allocation.traces import Shape, trace, zipf
from benchmarks.stack import local_stack, put_limits
from leasehold.local_stack.plan import REGIONS
from tests.end_to_end.launching import free_base_port

pytestmark = pytest.mark.anyio

# The allowance is spent before the end, and before the partitioned region is back.
CUT_OFF = wan.Slow(zipf, limit=900, length_s=5, cut_s=(1, 4))
LOST = wan.Slow(zipf, limit=900, length_s=5, cut_s=(1, 4), is_lost=True)
RATE = wan.Slow(zipf, limit=100, length_s=2)


@pytest.mark.extended
async def test_no_unit_is_sold_twice_or_lost_between_far_and_cut_off_regions() -> None:
    shapes: dict[str, Shape] = {"cut-off": CUT_OFF, "lost": LOST}
    quotas = [*(wan.allowance(name, shape.limit) for name, shape in shapes.items()), wan.rate("rate", RATE.limit)]
    async with local_stack(free_base_port(), "--wan") as stack:
        await put_limits(stack, wan.limits(quotas), wan.HEARD.check, REGIONS)
        for name, shape in shapes.items():
            real = await wan.play_allowance(stack, trace(name, shape, 1), wan.Subject(name, "acme"))
            assert real.measured.over == 0
            assert (real.books.status, real.played.others) == ("balanced", 0)
            assert real.books.consumed + real.books.suspense == real.books.admitted == real.played.admitted
            assert real.books.is_exact
        of_rate = await wan.play_rate(stack, trace("rate", RATE, 1), wan.Subject("rate", "acme"))
    assert of_rate.played.others == 0
    bound_s = 1  # the worst case beyond bucket and rate: docs/guides/limits.md
    assert 0 < of_rate.played.admitted <= RATE.limit * (1 + bound_s + of_rate.played.took_s)
