"""One process that keeps the DRAM and SSD tiers of a host for all others: ``sglang-ext store serve``
(docs/store-service.md).

``StoreClient`` is an ``IndexStore``. Messages go over a Unix socket; indexes never do: clients map the files.
"""

from .client import StoreClient
from .depot import Depot
from .folder import ServedFolder
from .messages import Status, TierStatus
from .server import Limits, StoreServer

__all__ = ["Depot", "Limits", "ServedFolder", "Status", "StoreClient", "StoreServer", "TierStatus"]
