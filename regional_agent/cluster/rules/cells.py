"""Which cell of a Cluster a quota lies in, for good: their number is part of what the coordinator knows of an epoch.

All that is counted by a tenant lies with the tenant, so that a request whose policies are counted so is decided by one
script. What is counted otherwise lies wherever its own key says.
"""

import re
import zlib
from functools import lru_cache
from urllib.parse import quote

CELLS = 16
KEYS_KEPT = 65_536
_TENANT = re.compile(r"[:,]tenant=([^,]*)")


@lru_cache(KEYS_KEPT)
def cell_of(quota: str) -> int:
    counted_by = _TENANT.search(quota)
    return _hashed(quota if counted_by is None else counted_by[1])


def home_of(tenant: str) -> int:
    """Where operations of a tenant are known."""
    return _hashed(quote(tenant, safe=""))


def _hashed(text: str) -> int:
    return zlib.crc32(text.encode()) % CELLS
