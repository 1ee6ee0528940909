"""Where prefix indexes live: their identity, their file format (docs/index-format.md), and the stores that keep them.

Knows no torch, no GPU and no SGLang. ``open_store`` makes any store of its address; start with ``FileStore``.
"""

from .connect import open_store
from .copies import Copies
from .errors import (
    IndexCorrupt,
    IndexForeign,
    IndexFormatError,
    IndexMismatch,
    IndexNotFound,
    IndexStoreError,
    IndexTooNew,
    IndexUnreadable,
    InvalidPayload,
    OutOfMemory,
    StoreClosed,
    StoreFolderError,
    StoreFull,
    StoreUnavailable,
    printable,
    printable_values,
)
from .file import FileStore
from .format import (
    DTYPES,
    PAGE_TOKENS,
    ArrayKey,
    BuildInfo,
    IndexIdentity,
    ModelFingerprint,
    canonical_digest,
    model_mismatch,
    namespace_digest,
    page_hashes,
)
from .reader import IndexFile, IndexLookup
from .removals import Removal, read_removals
from .shared import SharedStore
from .store import Ask, BuildLease, Evictions, IndexEntry, IndexStore, Problem, Retention
from .writer import IndexPayload, IndexWriter, LazyArray
