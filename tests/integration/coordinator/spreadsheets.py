"""Read files for spreadsheets as programs do."""

import csv
import io

from coordinator.usage.rules.sheet import restored


def csv_rows(content: bytes) -> list[list[str]]:
    """Return the cells of a CSV file with its mark, and each text as it was."""
    text = content.decode()
    assert text.startswith("\ufeff")
    return [
        [restored(cell) for cell in row] for row in csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""))
    ]
