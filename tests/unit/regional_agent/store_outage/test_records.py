"""A journal is readable after its writer was killed midway or its disk was damaged."""

import zlib

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from regional_agent.store_outage.rules.local_allowances import AllowanceRequest, LocalAllowances, SeenLease
from regional_agent.store_outage.rules.records import (
    MOST_BYTES,
    MOST_LEASES,
    MOST_LINES,
    AdmittedOperation,
    Entry,
    Record,
    batches,
    is_foreign,
    owner_of,
    packed,
    read,
    summed,
)

entries = st.builds(
    Entry,
    st.sampled_from(["exports:tenant=acme", "exports:tenant=%C3%A4", "mails:user=1"]),
    st.sampled_from(["2026-11", "2026-12"]),
    st.integers(29_000_000, 29_000_002),
    st.sampled_from(['{"degraded":"open","policy":"export"}', '{"degraded":"local","policy":"a\\nb"}']),
    st.integers(1, 2**40),
)
operations = st.builds(
    AdmittedOperation, st.text(max_size=8), st.text(max_size=8), st.integers(1, 10**9), st.lists(entries, max_size=2)
)
records = st.builds(Record, st.lists(entries, min_size=1, max_size=4), st.lists(operations, max_size=2))


@given(st.lists(records, min_size=1, max_size=5), st.data())
def test_a_torn_end_costs_only_itself(written: list[Record], data: st.DataObject) -> None:
    raw = b"".join(map(packed, written))
    whole = len(raw) - len(packed(written[-1]))
    cut = data.draw(st.integers(whole, len(raw) - 1))
    assert read(raw) == (written, 0)
    assert read(raw[:cut]) == (written[:-1], 0)


@given(st.lists(records, min_size=2, max_size=5), st.data())
def test_a_damaged_record_costs_only_itself_and_is_reported(written: list[Record], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(written) - 2))
    packs = list(map(packed, written))
    at = data.draw(st.integers(0, len(packs[place]) - 2))
    spoilt = bytearray(packs[place])
    spoilt[at] ^= 0x41 if spoilt[at] ^ 0x41 != ord("\n") else 0x42
    packs[place] = bytes(spoilt)
    assert read(b"".join(packs)) == (written[:place] + written[place + 1 :], 1)


@given(st.lists(entries, max_size=20), st.integers(1, 8))
def test_batches_report_every_unit_once_and_are_deterministic(told: list[Entry], lanes: int) -> None:
    made = list(batches(told, 7, lanes))
    assert made == list(batches(reversed(told), 7, lanes))
    leases = [lease for batch in made for lease in batch.leases]
    assert len({(lease.quota, lease.period) for lease in leases}) == len(leases)
    for lease in leases:
        assert lease.consumed == sum(line.units for line in lease.lines)
        mine = [entry for entry in told if (entry.quota, entry.period) == (lease.quota, lease.period)]
        assert lease.consumed == sum(entry.units for entry in mine)
    assert sum(lease.consumed for lease in leases) == sum(entry.units for entry in told)


@given(st.lists(records, min_size=1, max_size=5), st.data())
def test_an_operation_is_booked_once_and_not_if_the_store_has_charged_it(
    written: list[Record], data: st.DataObject
) -> None:
    once = {operation.identity: operation for record in reversed(written) for operation in reversed(record.operations)}
    content = read(b"".join(map(packed, written)))
    assert content.is_decided == (not once)
    charged = data.draw(st.lists(st.sampled_from(sorted(once)), unique=True) if once else st.just([]))
    decided = read(b"".join(map(packed, [*written, Record([], [], list(charged))])))
    assert decided.is_decided
    unnamed = sum(entry.units for record in written for entry in record.entries)
    booked = sum(entry.units for name, each in once.items() if name not in charged for entry in each.entries)
    assert sum(entry.units for entry in decided.entries) == unnamed + booked
    assert list(decided.admitted) == list(content.admitted)


def test_a_record_of_a_release_before_is_read() -> None:
    raw = b'[[["exports","2026-11",29000000,"{}",5]],[["digest","body",1000]]]'
    content = read(b"%08x %s\n" % (zlib.crc32(raw), raw))
    assert (content.damaged, sum(entry.units for entry in content.entries)) == (0, 5)


def test_a_segment_is_foreign_if_its_region_or_its_installation_is_another() -> None:
    ours = owner_of("us-east", b"key")
    assert not any(is_foreign(written, ours) for written in ("", ours, owner_of("us-east", b"")))
    assert all(is_foreign(owner_of(*other), ours) for other in (("eu-west", b"key"), ("us-east", b"other")))
    assert read(packed(Record([], [], owner=ours))).owner == ours


def test_a_lane_with_many_leases_is_reported_in_several_batches() -> None:
    many = [Entry(f"exports:user={number}", "2026-11", 29_000_000, "{}", 1) for number in range(2 * MOST_LEASES + 1)]
    assert [(batch.lane, batch.seq, len(batch.leases)) for batch in batches(many, 7, 1)] == [
        (0, 1, MOST_LEASES),
        (0, 2, MOST_LEASES),
        (0, 3, 1),
    ]


@given(st.lists(entries, max_size=20))
def test_records_written_together_have_one_line_for_each_line_of_usage(told: list[Entry]) -> None:
    once = summed(told)
    assert sum(entry.units for entry in once) == sum(entry.units for entry in told)
    assert summed(once) == once


@given(st.integers(-5, 100), st.lists(st.integers(1, 30), max_size=10))
def test_admissions_from_an_allowance_are_at_most_its_fraction(available: int, costs: list[int]) -> None:
    allowances, lease = LocalAllowances(), SeenLease(available, until_ms=1_000)
    given_units = 0
    for cost in costs:
        [left] = allowances.left([AllowanceRequest("mails", cost, 200_000, lease)], now_ms=999)
        if left >= 0:
            allowances.give("mails", cost)
            given_units += cost
        else:
            assert given_units + cost > max(0, available) // 5, "it would have fitted"
    assert given_units <= max(0, available) // 5
    allowances.take_back("mails", given_units)
    assert allowances.left([AllowanceRequest("mails", 1, 200_000, lease)] * 2, 999) == [
        max(0, available) // 5 - 1,
        max(0, available) // 5 - 2,
    ]
    assert allowances.left([AllowanceRequest("mails", 1, 200_000, lease)], 1_000) == [-1], "the period is over"


def test_more_lines_than_a_message_carries_are_reported_in_several_batches() -> None:
    """A quarter of an hour of 3,400 keys a minute made one lease, one batch of which used to be refused for ever."""
    many = [
        Entry(
            "exports:tenant=acme", "2026-11", 29_000_000 + number % 15, f'{{"api_key":"{number:016x}"}}', 1 + number % 3
        )
        for number in range(50_500)
    ]
    consumed = lines = 0
    for seq, batch in enumerate(batches(many, 7, 4), start=1):
        [lease] = batch.leases
        assert batch.seq == seq
        assert 0 < len(lease.lines) <= MOST_LINES
        assert lease.consumed == consumed + sum(line.units for line in lease.lines)
        consumed, lines = lease.consumed, lines + len(lease.lines)
    assert (consumed, lines) == (sum(entry.units for entry in many), len(many))


def test_a_batch_is_bounded_in_bytes() -> None:
    wide = "".join(f'"d{number}":"{"x" * 250}",' for number in range(15)) + '"policy":"export"'
    many = [Entry("exports:tenant=acme", "2026-11", number, f"{{{wide}}}", 1) for number in range(2_000)]
    made = list(batches(many, 7, 1))
    sizes = [len(msgspec.json.encode(batch)) for batch in made]
    assert MOST_BYTES / 2 < max(sizes) <= MOST_BYTES + 1_000
    assert sum(len(batch.leases[0].lines) for batch in made) == len(many)
