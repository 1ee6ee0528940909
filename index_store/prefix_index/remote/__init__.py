"""Indexes on another machine, in a store that is there already: Mooncake, or anything ``obstore`` speaks to.

``RemoteStore(ObjectBlobs("s3://bucket/prefix"))``, ``RemoteStore(MooncakeBlobs("master:50051"))``. The client
libraries are optional and imported on ``open()``.
"""

from .blobs import BlobMissing, Blobs, BlobsError, BlobsFailed, BlobsFull, BlobTooShort, ObjectBlobs
from .mooncake import MooncakeBlobs
from .store import RemoteStore

__all__ = [
    "BlobMissing",
    "BlobTooShort",
    "Blobs",
    "BlobsError",
    "BlobsFailed",
    "BlobsFull",
    "MooncakeBlobs",
    "ObjectBlobs",
    "RemoteStore",
]
