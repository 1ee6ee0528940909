"""Where the selection benchmark's queries and keys come from: captures of a model, and planted distributions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from selection_methods import OFFLINE_CHANNELS
from torch import Tensor
from tqdm import tqdm

from prefix_kernels.testing import PLANTED, planted_config, planted_prefix
from sglang_ext.calibration import ChannelAccumulator, top_channels
from sglang_ext.calibration.capture import LayerCapture
from sglang_ext.calibration.prompt_capture import PromptCapture, load_capture, save_capture
from sglang_ext.methods.base import LayerProfile
from sglang_ext.quality.tasks import make_document


@dataclass(frozen=True, eq=False)
class Layer:
    """Queries, keys and values of one layer. All fp32.

    Attributes:
        q: [num_tokens, num_qo_heads, head_dim] of tokens behind the prefix.
        keys, values: [prefix_len, num_kv_heads, head_dim].
        samples: [num_kv_heads, num_samples, head_dim] or None.
    """

    q: Tensor
    keys: Tensor
    values: Tensor
    samples: Tensor | None


@dataclass(frozen=True)
class Item:
    """One prompt or one planted prefix; loaded when its turn comes.

    Attributes:
        source: "captured" or "planted".
        data: task, or kind of planted data.
        num_tokens: nominal length of the prefix.
        item: question number or seed.
        generator: parameters of planted data.
        load: makes the layers, in layer order, and the attention scale.
    """

    source: str
    data: str
    num_tokens: int
    item: int
    generator: dict[str, Any] | None
    load: Callable[[torch.device], tuple[list[Layer], float]]


def capture_files(folder: Path) -> list[tuple[str, int, int, Path]]:
    """(task, tokens, question, path) of every `<task>_<tokens>_<question>.safetensors`, by length first.

    Raises:
        ValueError: a file of another name.
        FileNotFoundError: no capture there.
    """
    found = []
    for path in folder.glob("*.safetensors"):
        parts = path.stem.rsplit("_", 2)
        if len(parts) != 3 or not (parts[1].isdecimal() and parts[2].isdecimal()):
            raise ValueError(f"expected <task>_<tokens>_<question>.safetensors in {folder}, got {path.name}; move it")
        found.append((parts[0], int(parts[1]), int(parts[2]), path))
    if not found:
        raise FileNotFoundError(f"expected captures in {folder}, got none; make them with --make-captures")
    return sorted(found, key=lambda file: (file[1], file[0], file[2]))


def captured_items(folder: Path, steps: int) -> Iterator[Item]:
    """One item per capture file, with its last `steps` decode steps."""
    for task, tokens, question, path in capture_files(folder):

        def load(device: torch.device, path: Path = path) -> tuple[list[Layer], float]:
            return capture_layers(load_capture(path, device), steps, path)

        yield Item("captured", task, tokens, question, None, load)


def capture_layers(capture: PromptCapture, steps: int, path: Path) -> tuple[list[Layer], float]:
    """All layers of a capture; of its tokens the last decode steps, or those of the prompt's end where it has none.

    Raises:
        ValueError: no token behind the prefix.
    """
    behind = capture.asked()
    decoded = behind[capture.positions[behind] >= capture.prompt_len]
    asked = (decoded if decoded.numel() else behind)[-steps:]
    if not asked.numel():
        raise ValueError(f"expected tokens behind the prefix in {path}, got none; take it with decode steps")
    samples = capture.samples().float()
    layers = []
    for i in range(capture.num_layers):
        own = samples[i] if samples.shape[2] else None
        q = capture.queries[i][asked].float()
        layers.append(Layer(q, capture.keys[i].float(), capture.values[i].float(), own))
    return layers, capture.sm_scale


def planted_items(lengths: Sequence[int], kinds: Sequence[str] = tuple(PLANTED), seed: int = 0) -> Iterator[Item]:
    """Each kind at each length, without and with RoPE."""
    for length in lengths:
        for kind in kinds:
            for rope in (False, True):
                config = planted_config(kind, length, rope=rope, seed=seed)

                def load(device: torch.device, config: Any = config) -> tuple[list[Layer], float]:
                    made = planted_prefix(config)
                    tensors = (made.queries, made.keys, made.values, made.samples)
                    return [Layer(*(tensor.to(device) for tensor in tensors))], made.sm_scale

                name = f"{kind}_rope" if rope else kind
                yield Item("planted", name, length, seed, dataclasses.asdict(config), load)


def calibrated_channels(folder: Path, steps: int, device: torch.device) -> list[LayerProfile]:
    """By layer the Double Sparsity rival's channels, from one capture per task of the shortest length. These captures
    are among the measured ones, which favours it a little.
    """
    shortest: dict[str, Path] = {}
    for task, _, _, path in capture_files(folder):
        shortest.setdefault(task, path)
    prompts = []
    for path in shortest.values():
        layers, _ = capture_layers(load_capture(path, device), steps, path)
        prompts.append([LayerCapture(one.q, one.keys, torch.full((len(one.q),), len(one.keys))) for one in layers])
    return _best_channels(prompts)


def own_channels(layer: Layer) -> LayerProfile:
    """The same for planted data: from the prefix itself, as there is no model."""
    queries = layer.q if layer.samples is None else layer.samples.transpose(0, 1)
    (found,) = _best_channels([[LayerCapture(queries, layer.keys, torch.arange(queries.shape[0]))]])
    return found


def _best_channels(prompts: Sequence[Sequence[LayerCapture]]) -> list[LayerProfile]:
    first = prompts[0][0]
    num_kv_heads, head_dim = first.keys.shape[1:]
    statistic = ChannelAccumulator(len(prompts[0]), first.queries.shape[1], num_kv_heads, head_dim)
    for prompt in prompts:
        statistic.add_prompt(prompt)
    best = top_channels(statistic.contribution(), min(OFFLINE_CHANNELS, head_dim)).sort(dim=-1).values
    return [LayerProfile(channels=tuple(map(tuple, of_layer))) for of_layer in best.tolist()]


Wanted = tuple[str, int, int, Path]
"""Task, tokens, question and file of a capture."""


def captures_missing(folder: Path, lengths: Sequence[int], tasks: Sequence[str], questions: int) -> list[Wanted]:
    """What a folder, made where it is not there, does not hold yet."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        (task, length, i, path)
        for length in lengths
        for task in tasks
        for i in range(questions)
        if not (path := folder / f"{task}_{length}_{i}.safetensors").exists()
    ]


def make_captures(wanted: Sequence[Wanted], model_path: str, sglang_flags: Sequence[str], seed: int) -> None:
    """Run the model over them through SGLang. Each question has a document of its own; captures are kept in bf16."""
    if not wanted:
        return
    from sglang_ext.cli.capturing import CaptureSession

    with CaptureSession(model_path, sglang_flags) as session:
        for task, length, i, path in tqdm(wanted):
            document = make_document(task, seed + i, num_tokens=length, num_questions=1)
            question = document.questions[0]
            prefix = session.tokens.of_text(document.text)
            ids = session.tokens.of_text(f"{document.text} {question.text}")
            if ids[: len(prefix)] != prefix:
                raise ValueError(f"expected the document's tokens at the head of the prompt of {path.name}, got others")
            steps = question.max_new_tokens - 1
            capture = session.capture(path.stem, ids, prefix_len=len(prefix), decode_steps=steps).behind(len(prefix))
            narrow = {name: getattr(capture, name).bfloat16() for name in ("queries", "keys", "values")}
            save_capture(dataclasses.replace(capture, **narrow), path)
