"""Train the needle model, the small model of this project that really retrieves; or measure one.

    python scripts/train_needle_model.py train --out CKPT --minutes 9
    python scripts/train_needle_model.py train --out CKPT2 --resume CKPT --start-length 139264
    python scripts/train_needle_model.py eval CKPT --lengths 4096,32768

The curriculum goes by accuracy, never by time: the jump from guessing to retrieving is a phase
transition whose moment differs from seed to seed. If it does not come, the next seed is tried.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from needle_data import CODES, Batch, Feeder, Stage
from needle_network import Cache, Needle, Shape, export, load, optimizers

from scripts.needle import vocabulary as vocab
from scripts.needle.facts import KINDS
from scripts.needle.tasks import TASKS, Question, make_document

STAGES = (
    Stage(128, 256),
    Stage(512, 128),
    Stage(2048, 64),
    Stage(8192, 16),
    Stage(18432, 8),
    Stage(36864, 4),
    Stage(73728, 2),
    Stage(139264, 1),
)
WINDOW = 30
THRESHOLD = 0.985
"""Accuracy of notes from which the sequences become longer."""
PLATEAU_STEPS = 3000
"""Of the first length, until the next seed is tried."""
REPORT_SECONDS = 5.0
NUM_QUESTIONS = 16
"""Of a document that is measured."""
FIRST_SEED = 10_000
"""Of the documents that are measured."""


class Curriculum:
    """Moves to the next length when notes are answered well at the current one."""

    def __init__(self, level: int) -> None:
        self.level = level
        self.recent: list[float] = []

    def see(self, length: int, accuracy: float) -> bool:
        """Record a step's note accuracy; True if the level changed."""
        if length != STAGES[self.level].length:
            return False
        self.recent = [*self.recent, accuracy][-WINDOW:]
        full = len(self.recent) == WINDOW
        mean = sum(self.recent) / len(self.recent)
        if full and mean >= THRESHOLD and self.level + 1 < len(STAGES):
            self.level += 1
        elif full and mean < 0.2 and self.level > 1:
            self.level -= 1
        else:
            return False
        self.recent = []
        return True


class Meter:
    """Accuracy per code and length, summed on the GPU since the last report."""

    def __init__(self, device: torch.device) -> None:
        self.sums: dict[int, Tensor] = {}
        self.device = device

    def add(self, length: int, codes: Tensor, right: Tensor) -> None:
        """Count right answers and targets by code."""
        sums = self.sums.setdefault(length, torch.zeros(2, len(CODES), device=self.device))
        sums[0].index_add_(0, codes, right.float())
        sums[1].index_add_(0, codes, torch.ones_like(codes, dtype=torch.float32))

    def report(self) -> str:
        """One line of percentages per length; clears the sums."""
        parts = []
        for length, sums in sorted(self.sums.items()):
            right, total = sums.tolist()
            shown = " ".join(f"{code} {100 * r / t:.1f}" for code, r, t in zip(CODES, right, total, strict=True) if t)
            parts.append(f"[{length}] {shown}")
        self.sums.clear()
        return "  ".join(parts)


def loss_of(model: Needle, batch: Batch, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Mean loss over answer tokens, which of them are right, and their codes."""

    def move(array: npt.NDArray[np.integer[Any]]) -> Tensor:
        tensor = torch.from_numpy(array)
        if device.type == "cuda":
            tensor = tensor.pin_memory().to(device, non_blocking=True)
        return tensor

    targets, others = move(batch.targets), move(batch.others)
    hidden, _ = model(move(batch.ids).long())
    logits = model.logits(hidden.flatten(0, 1)[move(batch.positions)])
    # The loss is minus the log of the probability of all right words together.
    accepted = torch.cat([targets[:, None], others], 1)
    chosen = logits.gather(1, accepted.clamp(min=0)).masked_fill(accepted < 0, -torch.inf)
    loss = (logits.logsumexp(-1) - chosen.logsumexp(-1)).mean()
    right = (accepted == logits.argmax(-1, keepdim=True)).any(1)
    return loss, right, move(batch.codes)


def rate(progress: float, step: int, warm_up: int, decay: float) -> float:
    """Share of the peak learning rate: warm-up by steps, constant, then linear decay by time."""
    return min(1.0, (step + 1) / warm_up, max(0.02, (1 - progress) / decay))


def compute_dtype(device: str) -> torch.dtype:
    """bfloat16 on a GPU, float32 elsewhere."""
    return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32


def train(args: argparse.Namespace) -> None:
    """Train until the minutes are over, exporting every minute."""
    began = time.monotonic()
    level = min(i for i, s in enumerate(STAGES) if s.length >= args.start_length)
    feeder = Feeder(args.seed, max(1, (os.cpu_count() or 2) - 2), STAGES, args.emphasis)
    feeder.level.value = level
    torch.set_float32_matmul_precision("high")
    try:
        seed = args.seed
        while not _attempt(args, seed, Curriculum(level), feeder, began):
            seed += 1
            print(f"plateau: starting again with seed {seed}", flush=True)
    finally:
        feeder.close()


class Reader:
    """Note accuracies of the last steps, read back rarely: every read waits for the GPU."""

    def __init__(self, curriculum: Curriculum, feeder: Feeder) -> None:
        self._curriculum = curriculum
        self._feeder = feeder
        self._pending: list[tuple[int, Tensor]] = []

    def add(self, step: int, length: int, codes: Tensor, right: Tensor) -> None:
        """Take in one step; every tenth moves the curriculum."""
        is_note = codes == CODES.index("note")
        self._pending.append((length, (right & is_note).sum() / is_note.sum()))
        if len(self._pending) < 10:
            return
        seen = torch.stack([accuracy for _, accuracy in self._pending]).tolist()
        for (at, _), accuracy in zip(self._pending, seen, strict=True):
            if not math.isnan(accuracy) and self._curriculum.see(at, accuracy):
                level = self._feeder.level.value = self._curriculum.level
                print(f"step {step}: length {STAGES[level].length}", flush=True)
        self._pending.clear()


def update(model: Needle, opts: list[torch.optim.Optimizer], loss: Tensor, lr: float) -> None:
    """Backward pass and one step of all optimizers."""
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for opt in opts:
        for group in opt.param_groups:
            group["lr"] = lr
        opt.step()
        opt.zero_grad(set_to_none=True)


def _attempt(args: argparse.Namespace, seed: int, curriculum: Curriculum, feeder: Feeder, began: float) -> bool:
    """Train one seed; False if it stayed on the plateau of the first length."""
    torch.manual_seed(seed)
    device, dtype = torch.device(args.device), compute_dtype(args.device)
    model = load(args.resume, dtype, args.device) if args.resume else Needle(Shape(), dtype)
    model.to(device)
    if device.type == "cuda":
        model.compile_blocks()
    opts = optimizers(model, args.lr)
    meter, reader, batches = Meter(device), Reader(curriculum, feeder), iter(feeder)
    last_report = last_export = time.monotonic()
    tokens = step = 0
    while (progress := (time.monotonic() - began) / (60 * args.minutes)) < 1:
        batch = next(batches)
        loss, right, codes = loss_of(model, batch, device)
        update(model, opts, loss, args.lr * rate(progress, step, args.warm_up, args.decay))
        step, tokens = step + 1, tokens + batch.ids.size
        meter.add(batch.ids.shape[1], codes, right)
        reader.add(step, batch.ids.shape[1], codes, right)
        if curriculum.level == 0 and step == PLATEAU_STEPS and not args.resume:
            return False
        now = time.monotonic()
        if now - last_report >= REPORT_SECONDS:
            speed = f"{tokens / (now - last_report) / 1e6:.2f}M tok/s"
            line = f"{now - began:5.0f}s step {step} loss {loss.item():.4f} {speed} {meter.report()}"
            print(line, flush=True)
            last_report, tokens = now, 0
        if now - last_export >= 60:
            export(model, args.out)
            last_export = now
    export(model, args.out)
    print(f"done: {step} steps, seed {seed}, {meter.report()}", flush=True)
    return True


@torch.inference_mode()
def answer(model: Needle, document: Cache, questions: list[list[int]], longest: int) -> list[list[int]]:
    """Greedy answers to questions of one length after a prefilled document."""
    device = model.embed.device
    ids = torch.tensor(questions, device=device)
    hidden, cache = model(ids, document, keep=True)
    produced = [model.logits(hidden[:, -1]).argmax(-1)]
    ended = produced[0] == vocab.END
    while len(produced) < longest and not bool(ended.all()):
        hidden, cache = model(produced[-1][:, None], cache, keep=True)
        produced.append(model.logits(hidden[:, -1]).argmax(-1))
        ended = ended | (produced[-1] == vocab.END)
    outputs: list[list[int]] = torch.stack(produced, 1).tolist()
    return outputs


@torch.inference_mode()
def measure(model: Needle, task: str, length: int, num_documents: int) -> tuple[int, int]:
    """Right answers and questions asked over so many documents."""
    right = total = 0
    for seed in range(FIRST_SEED, FIRST_SEED + num_documents):
        document = make_document(task, seed, length, NUM_QUESTIONS)
        ids = torch.tensor([vocab.encode(document.text)], device=model.embed.device)
        _, cache = model(ids, keep=True)
        for group in _by_length(document.questions):
            asked = [vocab.encode(question.text) for question in group]
            longest = max(question.max_new_tokens for question in group)
            for question, output in zip(group, answer(model, cache, asked, longest), strict=True):
                right += question.score(vocab.decode(output))
                total += 1
    return right, total


def _by_length(questions: tuple[Question, ...]) -> Iterator[list[Question]]:
    lengths = sorted({len(question.text.split()) for question in questions})
    for length in lengths:
        yield [question for question in questions if len(question.text.split()) == length]


def evaluate(args: argparse.Namespace) -> None:
    """Print greedy dense accuracy per task and length, as a Markdown table."""
    dtype = compute_dtype(args.device)
    model = load(args.checkpoint, dtype, args.device)
    lengths = [int(length) for length in args.lengths.split(",")]
    name = torch.cuda.get_device_name() if dtype == torch.bfloat16 else "cpu"
    print(f"{args.checkpoint}: {name}, torch {torch.__version__}, {dtype}, greedy, dense attention")
    print("| task | " + " | ".join(map(str, lengths)) + " | questions per length |")
    print("|---|" + "---|" * (len(lengths) + 1))
    for task in TASKS:
        found = [measure(model, task, length, args.documents) for length in lengths]
        shown = [f"{100 * right / total:.1f}" for right, total in found]
        print(f"| {task} | {' | '.join(shown)} | {found[0][1]} |", flush=True)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(description="Train or measure the needle model.")
    commands = top.add_subparsers(dest="command", required=True)
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    t = commands.add_parser("train", help="train and export a checkpoint")
    t.set_defaults(run=train)
    t.add_argument("--out", type=Path, required=True, help="folder of the exported checkpoint")
    t.add_argument("--resume", type=Path, help="checkpoint whose weights to start from")
    t.add_argument("--minutes", type=float, default=9.0, help="wall time, compilation included")
    t.add_argument("--seed", type=int, default=1, help="seed of weights and data")
    t.add_argument("--start-length", type=int, default=0, help="first length of the curriculum")
    t.add_argument("--device", default=default_device, help="torch device")
    t.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    t.add_argument("--warm-up", type=int, default=100, help="steps of warm-up")
    t.add_argument("--decay", type=float, default=0.4, help="last share of the time that decays")
    t.add_argument("--emphasis", choices=KINDS, help="a fact kind to train four times as often")
    e = commands.add_parser("eval", help="dense accuracy per task and length")
    e.set_defaults(run=evaluate)
    e.add_argument("checkpoint", type=Path, help="exported checkpoint")
    e.add_argument("--lengths", default="4096,8192,16384,32768", help="document lengths in tokens")
    e.add_argument("--documents", type=int, default=8, help="documents per task and length")
    e.add_argument("--device", default=default_device, help="torch device")
    return top


if __name__ == "__main__":
    arguments = parser().parse_args()
    arguments.run(arguments)
