"""The chain of a lane. Each report's head hashes the one before it and everything of the report that is billed.

Whoever changes, drops or inserts a transfer or a report later on has to change every head after it. The encoding is
fixed here: what a head covers is a list in this order, as JSON without spaces, the keys of objects sorted.
"""

import hashlib

import msgspec

from coordinator.domain.books import Report, Transfer

_encoder = msgspec.json.Encoder(order="sorted")


def genesis_head(epoch: int, lane: int) -> bytes:
    return hashlib.sha256(f"leasehold lane {epoch}/{lane}".encode()).digest()


def next_head(head: bytes, report: Report, body_hash: bytes) -> bytes:
    billed = [_billed(transfer) for transfer in report.transfers]
    covered = [report.region, report.epoch, report.lane, report.seq, body_hash.hex(), billed]
    return hashlib.sha256(head + _encoder.encode(covered)).digest()


def _billed(transfer: Transfer) -> list[object]:
    return [
        transfer.line,
        transfer.part,
        transfer.key.quota,
        transfer.key.period,
        transfer.charge_period,
        transfer.src,
        transfer.dst,
        transfer.units,
        transfer.cause,
        transfer.minute,
        transfer.dimensions,
    ]
