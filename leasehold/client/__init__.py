"""The client of a region's agent, for threads (`Client`) and for event loops (`AsyncClient`).

    client = Client("http://127.0.0.1:8411")
    export = {"tenant": "acme", "route": "/v1/exports", "method": "POST"}
    decision = client.check(export)
    if not decision.allowed:
        ...  # decision.retry_after_ms says when to try again

    @client.limited(lambda tenant: {"tenant": tenant, "route": "/v1/exports"})
    def make_export(tenant: str) -> None: ...  # Denied is raised in place of the call

    with client.holding(export, units=40) as hold:
        hold.commit(units=make(...))  # the actual cost; without a commit the hold is released

    @client.in_slot(lambda tenant: {"tenant": tenant, "route": "/v1/reports"})
    def make_report(tenant: str) -> None: ...  # takes a slot while it runs

`agent_protocol` decides which requests are sent and what the answers mean, without I/O. `_async` carries them
out on an event loop, and `_sync` is generated from it (`./dev sync-client`). `asyncio_io` and `thread_io` do their I/O.
"""
