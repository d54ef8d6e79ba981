"""The examples work against a real agent, each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml

from leasehold.local_stack.seed import LIMITS
from regional_agent.settings import AgentSettings
from tests.integration.client.test_clients import served_agent
from tests.integration.regional_agent.world import World
from web.settings import variable_of

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[3]


async def output_of(script: str, **variables: str) -> list[str]:
    """Run a script that imports an example. Return the lines that it prints."""
    command = [sys.executable, "-c", script]
    environment = os.environ | {"PYTHONPATH": str(ROOT), **variables}
    done = await anyio.run_process(command, env=environment, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().splitlines()


async def test_the_worker_works(world: World) -> None:
    async with served_agent(world) as url:
        command = [sys.executable, str(ROOT / "examples" / "worker.py"), url]
        done = await anyio.run_process(command, env=os.environ | {"PYTHONPATH": str(ROOT)})
    reported = "reported for acme, as one of few at once"
    assert done.stdout.decode().splitlines()[1:] == ["exported for acme", reported, "after waiting: allowed"]


@pytest.mark.extended
async def test_the_service_with_an_engine_works(world: World) -> None:
    settings = world.settings("us-east", return_on_stop=True)
    variables = {
        variable_of(AgentSettings, name): _text(value)
        for name, value in settings
        if name in settings.model_fields_set and value is not None
    }
    script = (
        "from fastapi.testclient import TestClient\n"
        "from examples.exports import app\n"
        "with TestClient(app) as client:\n"
        "    print(client.get('/healthz').status_code, client.post('/v1/exports', headers={'X-Tenant': 'a'}).json())\n"
    )
    command = [sys.executable, "-c", script]
    done = await anyio.run_process(
        command, env=os.environ | variables | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE
    )
    assert "200 {'export': 'made'}" in done.stdout.decode()


def _text(value: Any) -> str:
    return str(value.get_secret_value() if hasattr(value, "get_secret_value") else value)


@pytest.mark.extended
async def test_the_public_api_limits_anonymous_callers_by_network(world: World) -> None:
    document = yaml.safe_load((ROOT / "examples" / "public_api.yaml").read_text())
    assert (await world.admin.put("/v1/limits", json=document)).is_success
    script = (
        "import os\n"
        "from fastapi.testclient import TestClient\n"
        "from starlette.testclient import WebSocketDenialResponse\n"
        "from examples.public_api import app\n"
        "with TestClient(app, client=('203.0.113.9', 1)) as client:\n"
        "    for _ in range(4):\n"
        "        answer = client.get('/v1/weather/berlin')\n"
        "        print(answer.status_code, answer.json().get('requests_left'), 'Retry-After' in answer.headers)\n"
        "    with client.websocket_connect('/v1/live/berlin') as websocket:\n"
        "        print(websocket.receive_json())\n"
        "    try:\n"
        "        client.websocket_connect('/v1/live/berlin').__enter__()\n"
        "    except WebSocketDenialResponse as denied:\n"
        "        print('refused', denied.status_code)\n"
        "with TestClient(app, client=('198.51.100.7', 1)) as client:\n"
        "    print('elsewhere', client.get('/v1/weather/berlin').status_code)\n"
    )
    async with served_agent(world, leased=False) as url:
        printed = await output_of(script, LEASEHOLD_AGENT_URL=url)
    assert printed == [
        "200 2 False",
        "200 1 False",
        "200 0 False",
        "429 None True",
        "{'city': 'berlin', 'celsius': 7}",
        "refused 429",
        "elsewhere 200",
    ]


@pytest.mark.extended
async def test_a_paid_export_is_billed_once_and_by_its_real_size(world: World) -> None:
    script = (
        "from fastapi.testclient import TestClient\n"
        "from examples.paid_export import app\n"
        "with TestClient(app) as client:\n"
        "    def export(report, key, tenant='acme'):\n"
        "        headers = {'X-Tenant': tenant, 'Idempotency-Key': key}\n"
        "        answer = client.post(f'/v1/exports/{report}', headers=headers)\n"
        "        print(answer.status_code, answer.json().get('rows'))\n"
        "    for report, key in (('orders', '1'), ('orders', '1'), ('customers', '1'), ('nothing', '1')):\n"
        "        export(report, key)\n"
        "    for key in '234':\n"
        "        export('orders', key)\n"
    )
    async with served_agent(world) as url:
        printed = await output_of(script, LEASEHOLD_AGENT_URL=url)
    # 25 + 12 of 100 units are spent, so that 40 can be held once more.
    assert printed == ["200 25", "200 25", "200 12", "404 None", "200 25", "429 None", "429 None"]
    assert await world.usage(tenant="acme") == 62


SERVICES = {
    "wsgi_service": (
        "import httpx\n"
        "from examples.wsgi_service import application\n"
        "client = httpx.Client(transport=httpx.WSGITransport(application), base_url='http://localhost')\n"
        "def call(method, path):\n"
        "    answer = client.request(method, path, headers={'X-Tenant': 'acme'})\n"
        "    return answer.status_code, answer.text, answer.headers\n"
    ),
    "flask_service": (
        "from examples.flask_service import app\n"
        "def call(method, path):\n"
        "    answer = app.test_client().open(path, method=method, headers={'X-Tenant': 'acme'})\n"
        "    return answer.status_code, answer.text, answer.headers\n"
    ),
    "django_service": (
        "import examples.django_service\n"
        "from django.test import Client\n"
        "def call(method, path):\n"
        "    answer = Client().generic(method, path, headers={'X-Tenant': 'acme'})\n"
        "    return answer.status_code, answer.content.decode(), answer.headers\n"
    ),
}
CALLS = (
    "print(*call('GET', '/healthz')[:2])\n"
    "for _ in range(101):\n"
    "    status, text, headers = call('POST', '/v1/exports')\n"
    "    if status == 429 or '97 ' in text:\n"
    "        name = headers['RateLimit'].split(';')[0]\n"
    "        print(status, headers['X-RateLimit-Remaining'], name, 'Retry-After' in headers)\n"
    "print('denied_by' in text, '/problems/quota-exceeded' in text)\n"
)


@pytest.mark.parametrize("service", SERVICES)
async def test_a_service_of_each_framework_is_limited(world: World, service: str) -> None:
    async with served_agent(world) as url:
        printed = await output_of(SERVICES[service] + CALLS, LEASEHOLD_AGENT_URL=url)
    assert printed == ["200 healthy", "", '200 97 "limit-1" False', '429 0 "limit-1" True', "False True"]


@pytest.mark.extended
async def test_flask_answers_a_raised_denial(world: World) -> None:
    script = SERVICES["flask_service"] + (
        "from examples.flask_service import client\n"
        "slot = {'tenant': 'acme', 'route': '/v1/reports', 'method': 'POST'}\n"
        "print(call('POST', '/v1/reports')[:2])\n"
        "with client.slot(slot), client.slot(slot):\n"
        "    print(call('POST', '/v1/reports')[0])\n"
    )
    async with served_agent(world) as url:
        printed = await output_of(script, LEASEHOLD_AGENT_URL=url)
    assert printed == ["(200, 'reported\\n')", "429"]


@pytest.mark.extended
async def test_the_llm_gateway_limits_by_requests_and_tokens(world: World) -> None:
    quotas = [each for each in LIMITS["quotas"] if each["name"] in ("requests", "tokens")]
    few = {"limit": "3/hour, burst 30", "sharing": "regional"}  # ten in each region
    policies = [each | {"wait": "30s"} for each in LIMITS["policies"] if each["quota"] in ("requests", "tokens")]
    await world.try_out({"quotas": [quotas[0] | few, quotas[1]], "policies": policies})
    script = (
        "from fastapi.testclient import TestClient\n"
        "from examples.llm_gateway import app\n"
        "def ask(client):\n"
        "    body = {'prompt': 'say hello', 'max_tokens': 4000}\n"
        "    return client.post('/v1/chat', json=body, headers={'X-Tenant': 'acme'})\n"
        "with TestClient(app) as client:\n"
        "    print(ask(client).json(), [ask(client).status_code for _ in range(10)])\n"
        "    print('retry-after' in ask(client).headers)\n"
    )
    async with served_agent(world) as url:
        printed = await output_of(script, LEASEHOLD_AGENT=url)
    assert printed == [f"{{'text': 'You said: say hello', 'tokens': 6}} {[200] * 9 + [429]}", "True"]


@pytest.mark.extended
async def test_the_log_in_page_locks_out_and_unlocks(world: World) -> None:
    """A region has five of the fifteen wrong passwords that all regions permit."""
    chosen = {
        name: [each for each in LIMITS[name] if "logins" in (each["name"], each.get("quota"))]
        for name in ("quotas", "policies")
    }
    await world.try_out(chosen)
    script = (
        "import time\n"
        "from fastapi.testclient import TestClient\n"
        "from examples.login_page import app\n"
        "def log_in(client, password):\n"
        "    form = {'user': 'jane', 'password': password}\n"
        "    return client.post('/v1/login', data=form).status_code\n"
        "with TestClient(app) as client:\n"
        "    print([log_in(client, 'correct horse') for _ in range(7)], [log_in(client, 'x') for _ in range(7)])\n"
        "    print(log_in(client, 'correct horse'), client.post('/support/unlock/jane').status_code, end=' ')\n"
        "    give_up_s = time.monotonic() + 60\n"
        "    while (status := log_in(client, 'correct horse')) == 429 and time.monotonic() < give_up_s:\n"
        "        time.sleep(0.05)\n"
        "    print(status)\n"
    )
    async with served_agent(world) as url:
        variables = {"LEASEHOLD_AGENT": url, "LEASEHOLD_URL": world.url, "LEASEHOLD_TOKEN": world.tokens["admin"]}
        printed = await output_of(script, **variables)
    assert printed == ["[200, 200, 200, 200, 200, 200, 200] [401, 401, 401, 401, 401, 429, 429]", "429 204 200"]
