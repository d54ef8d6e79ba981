"""A fingerprint names the store, and the replicas that confirm its replies."""

from protocol.identifiers import MAX_REPLICAS, links_made_of, name_of, replicas_of, store_of, with_replicas

STORE = f"{'a' * 40}:{'b' * 40}"


def test_a_fingerprint_names_its_store_and_replicas() -> None:
    fingerprint = with_replicas(STORE, ["r2", "r1"], "12.3")
    assert fingerprint == f"{STORE}+12.3+r1+r2"
    assert (store_of(fingerprint), name_of(fingerprint)) == (STORE, ("a" * 40, "b" * 40))
    assert (sorted(replicas_of(fingerprint)), links_made_of(fingerprint)) == (["r1", "r2"], "12.3")


def test_a_store_alone_names_no_replica() -> None:
    assert with_replicas(STORE, [], "0.0") == STORE
    assert (store_of(STORE), replicas_of(STORE), links_made_of(STORE)) == (STORE, frozenset(), "")


def test_a_fingerprint_is_as_long_as_messages_allow() -> None:
    replicas = [f"{number:040}" for number in range(MAX_REPLICAS)]
    assert len(with_replicas(STORE, replicas, f"{2**32}.{2**32}")) <= 256
