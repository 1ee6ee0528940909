"""One process that keeps the DRAM and SSD folders of a host for all others: ``sglang-ext store serve`` (docs/store.md).

``StoreClient`` is a ``FileStore`` of the folder that the service names. Indexes never go over its socket.
"""

from .client import StoreClient, service_status
from .endpoint import raise_descriptor_limit
from .messages import Status, TierStatus
from .server import Limits, StoreServer

__all__ = ["Limits", "Status", "StoreClient", "StoreServer", "TierStatus", "raise_descriptor_limit", "service_status"]
