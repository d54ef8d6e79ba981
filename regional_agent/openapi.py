"""The agent's OpenAPI document, as it is checked in: `python -m regional_agent.openapi` writes it."""

import json
from pathlib import Path

from pydantic import SecretStr

from regional_agent.main import create_app
from regional_agent.settings import AgentSettings

PATH = Path(__file__).parent.parent / "docs" / "openapi" / "agent.json"


def document() -> str:
    """Return the document. It depends on the code alone: there are no connections, and no settings in it."""
    settings = AgentSettings(
        region="nowhere",
        coordinator_url="http://localhost",
        coordinator_token=SecretStr("none"),
        store_url=SecretStr("redis://localhost"),
    )
    return json.dumps(create_app(settings).openapi(), indent=2, ensure_ascii=False, sort_keys=True) + "\n"


if __name__ == "__main__":
    PATH.parent.mkdir(parents=True, exist_ok=True)
    PATH.write_text(document(), encoding="utf-8")
