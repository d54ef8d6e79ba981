"""The labels of a usage line, as one text: `model=large,tier=gold`.

A usage line has at most one text of labels, so rollups and exports need one column for them, whatever labels policies
name. It is canonical: names are in order, and a value has only those characters percent-encoded that would be read as
separators, so that people and spreadsheets read it as it stands.
"""

import re
from collections.abc import Iterable, Mapping
from urllib.parse import unquote

from protocol.check import LABEL_PATTERN

LABELS = "labels"  # the dimension of a usage line, and the column of rollups and exports
OTHER_LABELS = "*"  # of lines whose labels are too long, or beyond the bound of the ledger
MAX_USAGE_LABELS = 4  # that one policy records
MAX_LABELS_BYTES = 256  # of a text, which is part of a key in the database
MAX_LABEL_SETS = 1000  # that the ledger tells apart, for each quota key and period

_SEPARATORS = re.compile("[%,\x00-\x1f\x7f\ud800-\udfff]")
_NAME = LABEL_PATTERN.strip("^$")
_LABELS = re.compile(rf"{_NAME}=[^,]+(,{_NAME}=[^,]+)*")


def encode_labels(labels: Iterable[tuple[str, str]]) -> str:
    """Return labels as one text, or OTHER_LABELS if that is too long."""
    text = ",".join(f"{name}={encode_label(value)}" for name, value in sorted(labels))
    return text if _is_short(text) else OTHER_LABELS


def encode_label(value: str) -> str:
    """Return the value of a label as it stands in a text."""
    return _SEPARATORS.sub(lambda found: f"%{ord(found[0]):02X}", value)


def decode_label(text: str) -> str:
    return unquote(text)


def sound_labels(dimensions: Mapping[str, str]) -> str | None:
    """Return the labels of a reported line. What no agent of ours writes is reported as OTHER_LABELS."""
    labels = dimensions.get(LABELS)
    if labels is None or (_is_short(labels) and _LABELS.fullmatch(labels)):
        return labels
    return OTHER_LABELS


def _is_short(text: str) -> bool:
    return len(text) <= MAX_LABELS_BYTES and len(text.encode(errors="replace")) <= MAX_LABELS_BYTES
