"""Labels of usage lines are one canonical text, which the ledger can take apart again."""

from hypothesis import given
from hypothesis import strategies as st

from protocol.limits.usage_labels import (
    MAX_LABELS_BYTES,
    OTHER_LABELS,
    decode_label,
    encode_label,
    encode_labels,
    sound_labels,
)

NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,31}", fullmatch=True)
VALUES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)


@given(labels=st.dictionaries(NAMES, VALUES, min_size=1, max_size=4))
def test_a_text_of_labels_can_be_taken_apart(labels: dict[str, str]) -> None:
    text = encode_labels(labels.items())
    assert text == encode_labels(reversed(labels.items()))
    assert sound_labels({"labels": text}) == text
    assert len(text.encode()) <= MAX_LABELS_BYTES
    if text != OTHER_LABELS:
        pairs = (pair.partition("=") for pair in text.split(","))
        assert {name: decode_label(value) for name, _, value in pairs} == labels


def test_values_are_readable_where_they_hold_no_separator() -> None:
    assert encode_labels([("model", "gpt-4o/mini é"), ("by", "a=b")]) == "by=a=b,model=gpt-4o/mini é"
    assert encode_label("10%, x\n") == "10%25%2C x%0A"


def test_labels_that_no_agent_writes_are_others() -> None:
    for text in ("", "large", "model=", "=large", "Model=large", "model=large,", f"model={'x' * 300}", "a=é" * 90):
        assert sound_labels({"labels": text}) == OTHER_LABELS, text
    assert sound_labels({"policy": "export"}) is None
