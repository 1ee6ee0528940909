"""One process that keeps the DRAM and SSD folders of a host for all others: ``sglang-ext store serve``."""

from .client import StoreClient, service_status
from .endpoint import raise_descriptor_limit
from .messages import Status, TierStatus
from .server import Limits, StoreServer
