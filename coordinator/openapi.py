"""The coordinator's OpenAPI document, as it is checked in: `python -m coordinator.openapi` writes it anew."""

import json
from pathlib import Path

from pydantic import SecretStr

from coordinator.main import create_app
from coordinator.settings import CoordinatorSettings

PATH = Path(__file__).parent.parent / "docs" / "openapi" / "coordinator.json"


def document() -> str:
    """Make the document from the code alone, without a connection and without the environment."""
    app = create_app(CoordinatorSettings(database_url=SecretStr("postgresql://nobody@localhost/nothing")))
    return json.dumps(app.openapi(), indent=2, ensure_ascii=False, sort_keys=True) + "\n"


if __name__ == "__main__":
    PATH.parent.mkdir(parents=True, exist_ok=True)
    PATH.write_text(document(), encoding="utf-8")
