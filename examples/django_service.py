"""A Django service, in one file, whose requests are checked before it sees them.

eval "$(./dev env)"
LEASEHOLD_AGENT_URL=$AGENT_US_EAST python examples/django_service.py runserver 9000
curl -i http://127.0.0.1:9000/v1/exports -X POST -H 'X-Tenant: acme'
"""

import os
import sys
from functools import partial
from typing import Any

from django.conf import settings
from django.core.management import execute_from_command_line
from django.core.wsgi import get_wsgi_application
from django.http import HttpResponse
from django.urls import path

from leasehold import Client, Subject
from leasehold.middleware.django import DjangoLimitMiddleware

client = Client(os.environ.get("LEASEHOLD_AGENT_URL", "http://127.0.0.1:8411"))


def subject_of(request: Any) -> Subject | None:
    """Return who makes a request, and for what. Health checks are not limited."""
    if request.path == "/healthz":
        return None
    return {"tenant": request.headers.get("X-Tenant", "anonymous"), "route": request.path, "method": request.method}


limit = partial(DjangoLimitMiddleware, check=client.check, subject=subject_of)  # MIDDLEWARE names it


def read_health(_: Any) -> HttpResponse:
    return HttpResponse("healthy\n")


def make_export(request: Any) -> HttpResponse:
    return HttpResponse(f"{request.limit_decision.policies[0].remaining} exports left\n")


urlpatterns = [path("healthz", read_health), path("v1/exports", make_export)]

settings.configure(
    ALLOWED_HOSTS=["127.0.0.1", "localhost", "testserver"],
    MIDDLEWARE=[f"{__name__}.limit"],
    ROOT_URLCONF=__name__,
    SECRET_KEY="an example signs nothing",  # noqa: S106 - it is none
)
application = get_wsgi_application()

if __name__ == "__main__":
    execute_from_command_line(sys.argv)
