"""Run ClickHouse in a process of its own: `python -m tests.clickhouse LIBRARY < REQUEST`.

It makes the tables of `compose/kafka/clickhouse.sql`, puts messages of Kafka into the queue, and writes the rows of
each query as a line of JSON. ClickHouse inside of a process starts no consumers, so here the queue is a table of the
engine Null, which hands what is inserted to its views as the engine Kafka does.
"""

import json
import re
import sys
from importlib import import_module
from pathlib import Path

TABLES = Path(__file__).parents[1] / "compose" / "kafka" / "clickhouse.sql"
_KAFKA = re.compile(r"ENGINE = Kafka\nSETTINGS[^;]*")


def main(library: str, messages: list[str], queries: list[str]) -> None:
    sys.path.insert(0, library)
    clickhouse = import_module("chdb.session").Session()
    tables, replaced = _KAFKA.subn("ENGINE = Null", TABLES.read_text())
    assert replaced == 1
    lines = "\n".join(json.dumps({"message": message}) for message in messages)
    for statement in (*tables.split(";\n"), f"INSERT INTO decisions_queue FORMAT JSONEachRow {lines}"):
        if statement.strip():
            clickhouse.query(statement)
    for query in queries:
        rows = str(clickhouse.query(query, "JSONEachRow")).splitlines()
        sys.stdout.write(json.dumps([json.loads(row) for row in rows]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], **json.load(sys.stdin))
