"""Indexes on another machine, by Mooncake or ``obstore``. These libraries are imported on ``open()``."""

from .blobs import BlobMissing, Blobs, BlobsError, BlobsFailed, BlobsFull, BlobTooLong, ObjectBlobs
from .mooncake import MooncakeBlobs
from .store import RemoteStore
