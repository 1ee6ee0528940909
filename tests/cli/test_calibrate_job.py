"""`sglang-ext calibrate` with a stand-in for the engine: made-up captures, the real measurements, files and report."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from prefix_index import ModelFingerprint
from sglang_ext.calibration.prompt_capture import PromptCapture
from sglang_ext.cli import INTERRUPTED, main
from sglang_ext.cli.arguments import Parser
from sglang_ext.cli.calibrate import add_parser
from sglang_ext.cli.calibrate_job import CalibrateJob
from sglang_ext.compat.engine import EngineStartError
from sglang_ext.methods.profile import ProfileError, load_profile
from sglang_ext.profiles import check_profile
from tests.calibration.captures import make_capture
from tests.prefix_index.samples import sample_model
from tests.token_sources import word_lengths

MODEL = sample_model(num_layers=3, num_kv_heads=2, head_dim=16, v_head_dim=16)
NAMES = ("copy-1", "copy-2", "needle-1", "needle-2")


class Engine:
    """Stands in for `open_session` and its session; class attributes say what goes wrong."""

    starts = 0
    captured: list[str]
    model: ModelFingerprint = MODEL
    broken: frozenset[str] = frozenset()
    interrupted_at: str | None = None
    refuses = False

    def __init__(self, model_path: str, flags: list[str], **options: Any) -> None:
        Engine.starts += 1
        assert flags[:2] == ["--device", "cpu"]
        assert options["query_samples"] == 64
        self.decode_steps = options["decode_steps"]

    def __enter__(self) -> Engine:
        if self.refuses:
            raise EngineStartError("refused")
        return self

    def __exit__(self, *error: object) -> None: ...

    tokens = word_lengths()

    def capture(self, name: str, input_ids: list[int], prefix_len: int | None = None) -> PromptCapture:
        if name == self.interrupted_at:
            raise KeyboardInterrupt
        if name == "refused" or name in self.broken:
            raise ValueError(f"{name}: refused by SGLang: too long")
        if name == "memory":
            raise torch.OutOfMemoryError("out of memory")
        Engine.captured.append(name)
        capture = make_capture(sum(map(ord, name)), num_layers=3, prefix_len=288, sampled=96, asked=self.decode_steps)
        if name == "nan":
            return replace(capture, keys=torch.full_like(capture.keys, torch.nan))
        return capture.behind(60) if name == "short" else capture


@pytest.fixture
def calibrate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Any]:
    """Runs the command over prompts of these names: (status, stderr)."""
    monkeypatch.setattr("sglang_ext.cli.engines.open_session", Engine)
    for name in ("starts", "model", "broken", "interrupted_at", "refuses"):
        monkeypatch.setattr(Engine, name, getattr(Engine, name))
    monkeypatch.setattr(Engine, "starts", 0)
    monkeypatch.setattr(Engine, "captured", [], raising=False)

    def run(
        *words: str, names: tuple[str, ...] = NAMES, model: str = str(tmp_path), chat: bool = False, flags: str = ""
    ) -> tuple[int, str]:
        data = tmp_path / "dev.jsonl"
        said = [[{"role": "system", "content": f"one two {name}"}] if chat else f"one two {name}" for name in names]
        lines = [{"id": name, "messages" if chat else "text": one} for name, one in zip(names, said, strict=True)]
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        fixed = ["--model", model, "--data", str(data), "--out", str(tmp_path / "out" / "profile.json")]
        fixed += ["--decode-steps", "6", "--query-samples", "64", "--device", "cpu", *words]
        capsys.readouterr()
        status = main(["calibrate", *fixed, "--", "--device", "cpu", *flags.split()])
        return status, capsys.readouterr().err

    return run


@pytest.fixture
def profile_path(tmp_path: Path) -> Path:
    return tmp_path / "out" / "profile.json"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "out" / "profile.json.state"


def test_a_run_writes_a_profile_of_this_model(calibrate: Any, profile_path: Path) -> None:
    # Nearly uniform attention: of 288 tokens the best 14 hold little, and the served 128 most.
    words = ("--anchors", "1", "--num-channels", "4", "--keep-ratio", "0.05", "--description", "made up")
    status, said = calibrate(*words)
    assert status == 0, said
    assert "4 measured, 0 left out; anchors 1; recommended" in said
    assert "with this profile no layer selects" not in said
    profile = load_profile(profile_path)
    check_profile(profile, MODEL)
    with pytest.raises(ProfileError, match="it was calibrated with other RoPE settings"):
        check_profile(profile, msgspec.structs.replace(MODEL, rope_digest="f" * 64))
    assert profile.plan().anchor_layers == (1,)
    assert len(profile.channels[2][1]) == 4
    assert not any(profile.dense_heads)
    recommended = profile.recommended
    assert (recommended.method, recommended.keep_ratio) == ("token_index", 0.05), "not judged: as asked for"
    assert (profile.calibration.prompts, profile.calibration.description) == (4, "made up")
    assert profile.calibration.tokens == 4 * 3


def test_a_description_that_is_no_text_costs_no_profile(calibrate: Any, profile_path: Path) -> None:
    """Typed in Latin-1; a file's name may be such a one, too."""
    status, said = calibrate("--description", "caf\udce9")
    assert (status, json.loads(profile_path.read_text())["calibration"]["description"]) == (0, r"caf\xe9"), said


def test_a_profile_under_which_no_layer_selects_is_said_to_be_one(calibrate: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("sglang_ext.calibration.fit.MIN_ORACLE_RECALL", 1.1)
    status, said = calibrate()
    assert status == 0, said
    assert "near-uniform KV head attend everything: layer 1 head 0, layer 1 head 1, layer 2 head 0" in said
    assert "with this profile no layer selects: calibrate on longer prompts" in said


def test_an_interrupted_run_goes_on_where_it_was(
    calibrate: Any, profile_path: Path, state: Path, monkeypatch: Any
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "interrupted_at", "needle-1")
        status, said = calibrate()
    assert (status, Engine.captured) == (INTERRUPTED, ["copy-1", "copy-2"])
    assert "run the same command again" in said
    assert not profile_path.exists()
    assert (calibrate()[0], Engine.captured) == (0, list(NAMES))
    resumed, note = profile_path.read_bytes(), state / "note.txt"
    note.write_text("keep")
    assert calibrate("--no-resume")[0] == 0
    assert (Engine.captured, note.read_text()) == ([*NAMES, *NAMES], "keep"), "nothing else is removed"
    assert profile_path.read_bytes() == resumed, "a resumed run measures what a whole one does"


def test_a_complete_state_is_fitted_without_the_engine(calibrate: Any, profile_path: Path) -> None:
    assert calibrate()[0] == 0
    status, said = calibrate("--anchors", "2", "--block-average", "32", "--method", "csattention")
    assert (status, Engine.starts) == (0, 1)
    assert "without running the model" in said
    profile = load_profile(profile_path)
    assert (profile.plan().anchor_layers, profile.recommended.method) == ((1, 2), "csattention")
    assert calibrate("--dense-layers", "0,1")[0] == 0
    assert (load_profile(profile_path).plan().dense_layers, Engine.starts) == ((0, 1), 1)


def test_measuring_on_the_cpu_leaves_judging_to_the_gpu(tmp_path: Path, monkeypatch: Any) -> None:
    data = tmp_path / "dev.jsonl"
    data.write_text("".join(json.dumps({"id": name, "text": name}) + "\n" for name in NAMES))
    parser = Parser()
    add_parser(parser.add_subparsers())

    def judges(*flags: str, gpu: bool = True) -> bool:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        words = ["calibrate", "--model", "m", "--data", str(data), "--out", str(tmp_path / "p.json"), "--device", "cpu"]
        return CalibrateJob(parser.parse_args([*words, "--", *flags])).judges

    assert (judges(), judges("--device", "cpu"), judges(gpu=False)) == (True, False, False)


OLDER = {"version": 4, "a_former_setting": 1, "model": msgspec.to_builtins(MODEL)}


@pytest.mark.parametrize(
    ("words", "names", "settings", "message"),
    [
        ("--keep-ratio 0.1", NAMES, "", "expected measurements with keep_ratio=0.1"),
        ("--max-tokens 8", NAMES, "", "with max_tokens=8"),
        ("", (*NAMES, "more-1"), "", "expected measurements with data="),
        ("", NAMES, None, "expected settings.json beside the measurements"),
        ("", NAMES, "{}", "expected settings in"),
        ("", NAMES, json.dumps(OLDER), "expected measurements with version=5"),
        ("", NAMES, "weights", "expected measurements of the weights"),
        ("", NAMES, "rope", "expected measurements with the RoPE settings of"),
    ],
)
def test_a_state_of_other_settings_or_weights_is_refused_before_the_model_is_loaded(
    calibrate: Any, state: Path, words: str, names: Any, settings: str | None, message: str
) -> None:
    assert calibrate()[0] == 0
    if settings == "weights":
        (state.parents[1] / "model.safetensors").write_bytes(b"other weights")
    elif settings == "rope":
        (state.parents[1] / "config.json").write_text('{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}')
    elif settings is None:
        (state / "settings.json").unlink()
    elif settings:
        (state / "settings.json").write_text(settings)
    status, said = calibrate(*words.split(), names=names)
    assert (status, Engine.starts) == (2, 1)
    assert message in said
    assert "--no-resume" in said
    assert calibrate("--no-resume")[0] == 0
    assert len(Engine.captured) == 8


def test_a_state_of_chats_that_were_rendered_otherwise_is_refused(
    calibrate: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(
        Engine.tokens,
        "of_chat",
        lambda messages, *_: Engine.tokens.of_text(" ".join(message["content"] for message in messages)),
    )
    template = tmp_path / "one.jinja"
    template.write_text("{{ messages }}")
    first, second = f"--chat-template {template}", "--chat-template=chatml"
    assert [calibrate(flags=flags)[0] for flags in (first, second)] == [0, 0], "of texts it says nothing"
    assert calibrate("--no-resume", chat=True, flags=first)[0] == 0
    assert calibrate(chat=True, flags=first)[0] == 0
    for flags, wanted in (("", "None"), (second, "'chatml'"), (f"{first} --reasoning-parser qwen3", "'qwen3'")):
        status, said = calibrate(chat=True, flags=flags)
        assert (status, Engine.starts) == (2, 2)
        assert f"={wanted} in" in said
    template.write_text("{{ messages[0] }}")
    status, said = calibrate(chat=True, flags=first)
    assert (status, "--chat-template='one.jinja (sha256" in said) == (2, True)
    assert calibrate("--no-resume", chat=True, flags=first)[0] == 0


def test_a_state_of_another_model_is_refused(calibrate: Any, monkeypatch: Any) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "interrupted_at", "needle-2")
        calibrate()
    monkeypatch.setattr(Engine, "model", sample_model(num_layers=4, num_kv_heads=2, head_dim=16, v_head_dim=16))
    status, said = calibrate()
    assert status == 1
    assert "got another (model.num_layers: expected 4, found" in said


def test_prompts_that_cannot_be_measured_are_left_out_by_name(calibrate: Any, tmp_path: Path) -> None:
    status, said = calibrate("--report", str(tmp_path / "report"), names=(*NAMES, "refused", "nan", "short", "memory"))
    assert status == 1
    for words in (
        "memory: left out: OutOfMemoryError: out of memory",  # whatever it is, it ends no job
        "refused: left out: refused: refused by SGLang: too long",
        "nan: left out: expected finite keys",
        "short: left out: expected a prefix of more than 80 tokens",
        "4 measured, 4 left out",
    ):
        assert words in said
    assert "refused by SGLang" in (tmp_path / "report" / "report.html").read_text()


def test_too_few_prompts_make_no_profile(calibrate: Any, profile_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(Engine, "broken", frozenset(NAMES[1:]))
    status, said = calibrate()
    assert (status, profile_path.exists()) == (1, False)
    assert "got 1 and 0; no profile is written" in said


def test_a_damaged_measurement_is_made_again(calibrate: Any, state: Path) -> None:
    assert calibrate()[0] == 0
    sorted(state.glob("*.safetensors"))[0].write_bytes(b"torn")
    status, said = calibrate()
    assert (status, len(Engine.captured)) == (0, 5)
    assert "measured again: expected a measurement" in said


def test_too_many_anchors_are_refused_before_the_first_prompt(calibrate: Any) -> None:
    """Also where nothing is measured, nor a model read."""
    for words in ((), ("--anchors", "3", "not-here")):
        status, said = calibrate("--anchors", "3", model=words[2]) if words else calibrate("--anchors", "3")
        assert (status, len(Engine.captured)) == (1, 4 if words else 0)
        assert "expected --anchors in 1..2 (the layers from 1 on), got 3" in said
        assert calibrate()[0] == 0


def test_no_measurement_is_removed_for_a_run_that_cannot_start(
    calibrate: Any, tmp_path: Path, state: Path, monkeypatch: Any
) -> None:
    assert calibrate()[0] == 0
    status, said = calibrate("--no-resume", model=str(tmp_path / "nowhere"))
    assert (status, Engine.starts) == (2, 1)
    assert "expected --model-path to be a folder" in said
    monkeypatch.setattr(Engine, "refuses", True)
    for words in ((), ("--anchors", "3")):
        assert calibrate("--no-resume", *words)[0] == 2, "SGLang's own refusal"
    monkeypatch.setattr(Engine, "refuses", False)
    assert calibrate("--no-resume", "--anchors", "3")[0] == 1, "the engine knows how many layers there are"
    assert len(list(state.glob("*.safetensors"))) == 4
    assert calibrate(model=str(tmp_path / "nowhere"))[0] == 0, "what is measured is fitted without the model"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--device cuda:99", "sglang-ext calibrate: expected --device"),
        ("--device gpu", "sglang-ext calibrate: expected --device"),
        ("--method exact", "expected --method to be one of"),
        ("--anchors 3", "expected --anchors in 1..2 (the layers from 1 on), got 3"),
        ("--dense-layers 0,1,2", "that leave one sparse"),
        ("--block-average 65", "expected --block-average in 1..64 tokens, got 65.0"),
        ("--block-average nan", "expected --block-average in 1..64 tokens, got nan"),
        ("--out {}", "expected to be able to write"),
        ("--out {}/dev.jsonl", "expected --out to be a file of its own"),
        ("--report {}/file/below", "expected to be able to write"),
        ("--state {}/file/below", "expected to be able to write"),
    ],
)
def test_what_cannot_be_is_refused_before_the_model_is_loaded(
    calibrate: Any, tmp_path: Path, words: str, message: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 3}')
    flag, value = words.format(tmp_path).split()
    status, said = calibrate(flag, value)
    assert (status, Engine.starts) == (2, 0)
    assert message in said
    assert value in said or "{}" not in words


@pytest.mark.parametrize("what", ["report", "profile.json"])
def test_a_full_disk_at_the_end_is_said(calibrate: Any, tmp_path: Path, monkeypatch: Any, what: str) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", what)

    monkeypatch.setattr("sglang_ext.cli.calibrate_job.write_report", full)
    if what == "profile.json":
        monkeypatch.setattr("sglang_ext.methods.profile.write_whole", full)
    status, said = calibrate("--report", str(tmp_path / "report"))
    assert status == 1
    assert f"No space left on device: '{what}'; make room, and run the same command again" in said


def test_a_disk_that_is_full_meanwhile_ends_the_job_and_leaves_no_prompt_out(
    calibrate: Any, profile_path: Path, monkeypatch: Any
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("sglang_ext.calibration.measurement.write_whole", full)
        status, said = calibrate()
    assert (status, Engine.captured, profile_path.exists()) == (1, ["copy-1"], False)
    assert "make room, and run the same command again" in said
    assert "left out" not in said
    assert calibrate()[0] == 0


def test_no_profile_is_made_without_measurements_that_went_away(
    calibrate: Any, profile_path: Path, state: Path, monkeypatch: Any
) -> None:
    """As by another job's --no-resume."""
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "__exit__", lambda *_: sorted(state.glob("*.safetensors"))[0].unlink())
        status, said = calibrate()
    assert (status, profile_path.exists()) == (1, False)
    assert "No such file" in said
    assert calibrate()[0] == 0


def test_a_report_without_matplotlib_is_refused_first(calibrate: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    status, said = calibrate("--report", str(tmp_path / "report"))
    assert (status, Engine.starts) == (2, 0)
    assert "pip install 'sglang-ext[calibrate]'" in said


def test_the_report_is_one_page_with_all_figures(calibrate: Any, tmp_path: Path) -> None:
    folder = tmp_path / "report"
    status, said = calibrate("--report", str(folder), "--description", "<made & up>")
    assert status == 0, said
    text = (folder / "report.html").read_text()
    loaded = re.findall(r'\b(?:src|href|data)="([^"]*)"', text)
    assert len(loaded) == 4
    assert all(image.startswith("data:image/png;base64,") for image in loaded)
    assert not re.search(r"https?://|@import|url\(", text)
    assert "&lt;made &amp; up&gt;" in text
    pngs = sorted(path.stem for path in folder.glob("*.png"))
    assert pngs == ["block_recall", "importance", "recovery", "sparsity"]
    values = json.loads((folder / "report.json").read_text())
    assert values["profile"] == json.loads((tmp_path / "out" / "profile.json").read_text())
    recommended = values["profile"]["recommended"]
    assert {**recommended, "reason": values["recommended"]["reason"]} == {
        **{key: value for key, value in values["recommended"].items() if key != "name"},
        "method": values["recommended"]["name"],
    }
