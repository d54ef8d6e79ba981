"""What every door of the coordinator works with. `main` builds one; nothing is kept in module globals."""

from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from coordinator.database.documents import Documents
from coordinator.database.engine import Database
from coordinator.metrics import Metrics
from coordinator.settings import CoordinatorSettings
from coordinator.signals import SignalHub
from protocol.clock import Clock


@dataclass(frozen=True)
class Coordinator:
    settings: CoordinatorSettings
    clock: Clock
    database: Database
    hub: SignalHub
    metrics: Metrics
    documents: Documents = field(default_factory=Documents)


def coordinator_of(request: Request) -> Coordinator:
    found = request.app.state.coordinator
    assert isinstance(found, Coordinator)
    return found


# As the type of a route's argument: FastAPI hands the coordinator in, and keeps it out of the OpenAPI document.
TheCoordinator = Annotated[Coordinator, Depends(coordinator_of)]
