"""An imported profile is of the model that SGLang serves: its digest is read off the configuration alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sglang_ext.methods.profile import load_profile
from tests.compat.sglang_process import GROUP, in_sglang

pytestmark = GROUP

MODEL = Path(__file__).resolve().parents[2] / "models" / "needle"


def imported(folder: str, model: str) -> tuple[int, str | None, list[str | None], int]:
    """Status; why a server refuses the profile, and why those with other values in their configuration do; status
    where SGLang refuses the flags.
    """
    from sglang.srt.server_args import prepare_server_args

    from sglang_ext.cli import main
    from sglang_ext.compat.checkpoint import model_refusal
    from sglang_ext.compat.server_args import settings_of

    words = ["profile", "import", f"{folder}/needle_layers_0_2_4.npy", "--model", model, "--out", f"{folder}/p.json"]
    status = main([*words, "--", "--device", "cpu"])
    flags = ["--model-path", model, "--device", "cpu", "--attention-backend", "torch_native", "--sparse-attn"]
    flags += ["--sparse-attn-store", folder, "--sparse-attn-config", f'{{"profile": "{folder}/p.json"}}']

    def refusal(*more: str) -> str | None:
        record = prepare_server_args([*flags, *more])
        getattr(record, "resolve_once", lambda: None)()
        settings = settings_of(record)
        assert settings is not None
        return model_refusal(record, settings)

    changes = ('{"rms_norm_eps": 0.5}', '{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}')
    other = [refusal("--json-model-override-args", change) for change in changes]
    return status, refusal(), other, main([*words, "--replace", "--", "--device", "cpu", "--nope"])


def test_a_server_takes_it(tmp_path: Path) -> None:
    head_map = np.array([[0, 1], [0, 0], [0, 1], [0, 0], [0, 1], [1, 1]], dtype=np.int32)
    np.save(tmp_path / "needle_layers_0_2_4.npy", head_map)
    status, refusal, other, refused = in_sglang("tests.compat.test_profile_import:imported", str(tmp_path), str(MODEL))
    assert (status, refusal, refused) == (0, None, 2)
    assert "it is of another model" in str(other[0])
    assert "calibrated with other RoPE settings" in str(other[1])
    profile = load_profile(tmp_path / "p.json")
    assert profile.model == load_profile(MODEL / "sparse_attn_profile.json").model
    assert profile.plan().anchor_layers == (1, 2, 4)
