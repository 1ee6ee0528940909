"""What tests of the methods have in common."""

from prefix_kernels.pooling import Pooling
from sglang_ext.methods import SelectArgs, make_selector
from tests.planted import randn  # noqa: F401 (of all tests here)


def select(spec, arrays, q, prefix_len, budget, num_sink=2, num_recent=5, sm_scale=0.25, pooling=Pooling.MAX):
    args = SelectArgs(
        prefix_len=prefix_len,
        budget=budget,
        num_sink=num_sink,
        num_recent=num_recent,
        sm_scale=sm_scale,
        pooling=pooling,
    )
    chosen = make_selector(spec).select(arrays, q, args)
    chosen.check_integrity(prefix_len)
    return chosen


def scores(spec, arrays, q, prefix_len, candidates=None, sm_scale=0.3, pooling=Pooling.MAX):
    args = SelectArgs(prefix_len=prefix_len, sm_scale=sm_scale, pooling=pooling)
    return make_selector(spec).token_scores(arrays, q, args, candidates)
