"""What an index belongs to: namespace, chained page hashes, model, and the identity made of them.

Everything here is a pure function of its arguments: equal on every machine, process and Python version.
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from .errors import InvalidPayload

FORMAT_VERSION = 1
PAGE_TOKENS = 16

_NAMESPACE_TAG = b"prefix_index/namespace/1\0"
_IDENTITY_TAG = b"prefix_index/identity/1\0"
_FIRST_PAGE_PARENT = bytes(32)
_HEX = frozenset(string.digits + "abcdef")


def namespace_digest(fields: Mapping[str, str | None]) -> str:
    """SHA-256 (64 hex digits) of everything in SGLang's ``RadixKey`` that is not tokens.

    ``fields`` maps field names (``extra_key``, ``cache_salt``) to values. Names and values are hashed with
    their lengths, in the order of the names, so that no two different sets of fields meet. A field that is
    None is the same as a field that does not exist ("no namespace" stays what it is when SGLang grows a
    field), and is different from the empty string. The values do not appear in the result.
    """
    h = hashlib.sha256(_NAMESPACE_TAG)
    for name, value in sorted(fields.items()):
        if value is None:
            continue
        for text in (name, value):
            raw = text.encode("utf-8", "surrogatepass")
            h.update(len(raw).to_bytes(8, "little"))
            h.update(raw)
    return h.hexdigest()


def page_hashes(token_ids: Sequence[int] | NDArray[Any], page_tokens: int = PAGE_TOKENS) -> list[bytes]:
    """Chained SHA-256 of each full page: ``digest[i] = sha256(digest[i-1] + int64_le(tokens of page i))``.

    The parent of page 0 is 32 zero bytes. ``token_ids`` [num_tokens] integers; a last page that is not full
    has no digest. Returns num_tokens // page_tokens digests of 32 bytes: digest n-1 names the first n pages.
    Raises InvalidPayload for anything but a flat sequence of int64 integers.
    """
    if page_tokens < 1:
        raise InvalidPayload("page_tokens", "1 or more", str(page_tokens), "use SGLang's page of 16 tokens")
    raw = _int64_le(token_ids).view(np.uint8).data
    step = page_tokens * 8
    sha256 = hashlib.sha256
    digest = _FIRST_PAGE_PARENT
    out: list[bytes] = []
    for start in range(0, len(raw) // step * step, step):
        digest = sha256(digest + raw[start : start + step]).digest()
        out.append(digest)
    return out


def _int64_le(token_ids: Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
    try:
        tokens = np.asarray(token_ids)
    except (OverflowError, ValueError) as err:
        tokens = np.empty(0, dtype=object)
        found = str(err)
    else:
        found = f"dtype {tokens.dtype}, shape {tokens.shape}"
        if tokens.size == 0 and tokens.ndim == 1:
            return np.empty(0, dtype="<i8")
    fits = tokens.dtype.kind in "iu" and tokens.ndim == 1
    if fits and tokens.dtype == np.uint64:
        fits = bool(tokens.max() <= np.iinfo(np.int64).max)
    if not fits:
        raise InvalidPayload("token ids", "a flat sequence of int64 integers", found, "pass the prompt's ids")
    return np.ascontiguousarray(tokens, dtype="<i8")


def canonical_digest(value: Any) -> str:
    """SHA-256 (64 hex digits) of a JSON value with sorted keys: for a model config, a RoPE setting, a spec.

    ``value`` is any nesting of dict, list, str, int, float, bool and None, or a msgspec Struct.
    """
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()


class ModelFingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The model that an index was built with. Two models with equal fingerprints have the same KV.

    ``config_digest``   digest of the architecture's configuration
    ``weights_digest``  digest or immutable revision of the weights
    ``rope_digest``     digest of the RoPE settings in force (scaling included)
    ``kv_dtype``        dtype of the KV cache, as SGLang says it (``bfloat16``, ``fp8_e4m3``, ...)
    ``num_layers``, ``num_kv_heads``  of the whole model, not of one tensor-parallel rank
    ``head_dim``, ``v_head_dim``      per head of K and of V
    """

    config_digest: str
    weights_digest: str
    rope_digest: str
    kv_dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        for name in ("config_digest", "weights_digest", "rope_digest", "kv_dtype"):
            _check_text(f"model.{name}", getattr(self, name))
        for name in ("num_layers", "num_kv_heads", "head_dim", "v_head_dim"):
            _check_count(f"model.{name}", getattr(self, name))


class IndexIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one index is the index of. A difference in any field is a miss, never a hit.

    ``namespace``       from ``namespace_digest`` (64 hex digits)
    ``page_tokens``     tokens per hashed page (not SGLang's page size: positions are logical)
    ``num_tokens``      prefix length, a multiple of page_tokens
    ``prefix_hash``     the chained hash of the last page (64 hex digits)
    ``model``           the model
    ``profile_digest``  of the profile or build spec: what was built, and how
    """

    namespace: str
    prefix_hash: str
    num_tokens: int
    model: ModelFingerprint
    profile_digest: str
    page_tokens: int = PAGE_TOKENS
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        for name in ("namespace", "prefix_hash"):
            if not is_digest(getattr(self, name)):
                raise ValueError(f"{name}: expected 64 lower-case hex digits, found {getattr(self, name)!r}")
        _check_text("profile_digest", self.profile_digest)
        for name in ("page_tokens", "num_tokens", "format_version"):
            _check_count(name, getattr(self, name))
        if self.num_tokens % self.page_tokens:
            raise ValueError(
                f"num_tokens: expected a multiple of page_tokens={self.page_tokens}, found {self.num_tokens}"
            )

    @classmethod
    def for_prefix(
        cls,
        *,
        namespace: str,
        page_hashes: Sequence[bytes],
        model: ModelFingerprint,
        profile_digest: str,
        page_tokens: int = PAGE_TOKENS,
    ) -> IndexIdentity:
        """The identity of the prefix that ends with the last of ``page_hashes`` (at least one)."""
        if not page_hashes:
            raise InvalidPayload("prefix", "at least one full page", "none", "index longer prefixes only")
        return cls(
            namespace=namespace,
            prefix_hash=page_hashes[-1].hex(),
            num_tokens=len(page_hashes) * page_tokens,
            model=model,
            profile_digest=profile_digest,
            page_tokens=page_tokens,
        )

    @property
    def digest(self) -> str:
        """SHA-256 (64 hex digits) over all fields; the name of the index in every store."""
        return hashlib.sha256(_IDENTITY_TAG + msgspec.json.encode(self, order="sorted")).hexdigest()

    def mismatch(self, other: IndexIdentity) -> str | None:
        """None when equal, else the first field that differs: "model.kv_dtype: expected A, found B".

        ``self`` is what is expected, ``other`` what was found.
        """
        order = ("format_version", "namespace", "page_tokens", "num_tokens", "prefix_hash")
        return (
            _first_difference(self, other, order)
            or model_mismatch(self.model, other.model)
            or _first_difference(self, other, ("profile_digest",))
        )


def model_mismatch(expected: ModelFingerprint, found: ModelFingerprint) -> str | None:
    """None when equal, else the first model field that differs, with both values."""
    return _first_difference(expected, found, ModelFingerprint.__struct_fields__, prefix="model.")


def is_digest(text: object) -> bool:
    """Whether ``text`` is 64 lower-case hex digits: the only strings that ever become part of a path."""
    return isinstance(text, str) and len(text) == 64 and _HEX.issuperset(text)


def _first_difference(a: object, b: object, names: Sequence[str], prefix: str = "") -> str | None:
    for name in names:
        left, right = getattr(a, name), getattr(b, name)
        if left != right:
            return f"{prefix}{name}: expected {left}, found {right}"
    return None


def _check_text(name: str, value: object) -> None:
    if type(value) is not str or not 1 <= len(value) <= 256 or not value.isprintable():
        raise ValueError(f"{name}: expected 1 to 256 printable characters, found {value!r}")


def _check_count(name: str, value: object) -> None:
    if type(value) is not int or not 1 <= value < 2**53:
        raise ValueError(f"{name}: expected a positive integer below 2**53, found {value!r}")
