"""The cell of a Cluster that a quota lies in. It never changes: epochs at the coordinator name cells by number.

Quotas that count by tenant lie in the tenant's cell, so one script decides a request whose policies all do. Other
quotas lie where the hash of their key says.
"""

import re
import zlib
from functools import lru_cache
from urllib.parse import quote

CELLS = 16
MAX_CACHED = 65_536
_TENANT = re.compile(r"[:,]tenant=([^,]*)")


@lru_cache(MAX_CACHED)
def cell_of(quota: str) -> int:
    tenant = _TENANT.search(quota)
    return _hash(quota if tenant is None else tenant[1])


def operation_cell(tenant: str) -> int:
    """Return the cell that remembers a tenant's operations."""
    return _hash(quote(tenant, safe=""))


def _hash(text: str) -> int:
    return zlib.crc32(text.encode()) % CELLS
