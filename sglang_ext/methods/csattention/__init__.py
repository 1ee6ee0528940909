"""CSAttention: query-centric tables per subspace, token scores by sparse accumulation. See `spec`."""

from sglang_ext.methods.csattention.build import CSAttentionBuilder
from sglang_ext.methods.csattention.reference import CSAttentionSelector
from sglang_ext.methods.csattention.spec import CSAttentionSpec
