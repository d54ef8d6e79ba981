"""Middleware that checks each request before the service sees it, one module for each kind of service.

| service                    | module   | use                                                              |
|----------------------------|----------|------------------------------------------------------------------|
| ASGI: FastAPI, Starlette … | `asgi`   | `LimitMiddleware`, for HTTP and WebSockets                       |
| WSGI                       | `wsgi`   | `WsgiLimitMiddleware`                                            |
| Flask                      | `flask`  | `install_limits(app, …)`                                         |
| Django                     | `django` | `DjangoLimitMiddleware`, made by a function that MIDDLEWARE names |

All of them answer a denial with 429, or 503 if a policy fails closed, with a problem document, `Retry-After` and the
RateLimit headers; put the decision where the service's code finds it; and answer `Denied`, raised by a hold or a
decorated function, in the same way. What customers see has no names of policies and quotas, unless `show_policies`
is set.
"""

from leasehold.middleware.asgi import AsyncCheckFunction, LimitMiddleware, by_route_and_address

__all__ = ["AsyncCheckFunction", "LimitMiddleware", "by_route_and_address"]
