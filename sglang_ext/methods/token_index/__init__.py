"""The token index: low-bit keys on a few channels, a score for every token. See `spec`."""

from sglang_ext.methods.token_index.build import TokenIndexBuilder, index_behind
from sglang_ext.methods.token_index.reference import TokenIndexSelector
from sglang_ext.methods.token_index.spec import TokenIndexSpec
