"""Which of the ways to make something of prompts a process goes, by its configuration."""

from __future__ import annotations

import logging

from prefix_index import IndexStore, ModelFingerprint
from sglang_ext.config import Build, SparseAttnConfig
from sglang_ext.methods.profile import Profile
from sglang_ext.model_view import ModelView
from sglang_ext.prefill.builds import PrefillBuilds
from sglang_ext.prefill.captures import PrefillCaptures
from sglang_ext.prefill.parts import Parts
from sglang_ext.prefill.recorder import Recording
from sglang_ext.prefill.shared_builds import SharedBuilds
from sglang_ext.ranks import Ranks

logger = logging.getLogger(__name__)


def make_recording(
    store: IndexStore,
    config: SparseAttnConfig,
    view: ModelView,
    model: ModelFingerprint,
    profile: Profile | None,
    ranks: Ranks,
    *,
    usable: bool,
) -> Recording | None:
    """What this process makes of the prompts that it prefills; None for nothing.

    Args:
        store: open store; not owned.
        config: checked configuration.
        view: the target model runner.
        model: its fingerprint.
        profile: the model's profile, where there is one.
        ranks: of this process. Making it may be a collective.
        usable: whether this server's decode steps can use an index.

    Raises:
        ValueError: more ranks than KV heads.
        RuntimeError: ranks have no folder in common.
    """
    if config.build is not Build.OFF and ranks.size > model.num_kv_heads:
        raise ValueError(
            f"--sparse-attn: expected at most {model.num_kv_heads} tensor-parallel ranks (KV heads) to build indexes; "
            f"got {ranks.size}. Build with a smaller --tp-size: any reads the indexes"
        )
    if config.build is Build.PREFILL:
        return PrefillBuilds(store, config, view, model, profile, ranks)
    if config.build is Build.SHARED:
        if usable:
            return SharedBuilds(store, config, view, model, profile, Parts.of_server(ranks))
        logger.warning("sparse attention: no index is built: none could be used (see above)")
    return PrefillCaptures(config, view) if config.build is Build.CAPTURE else None
