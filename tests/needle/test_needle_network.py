"""The exported checkpoint is the network that was trained, read by Hugging Face transformers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from needle_network import Needle, Shape, export, load

from scripts.needle import vocabulary as vocab
from scripts.needle.tasks import make_document


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Needle, Path]:
    torch.manual_seed(0)
    model = Needle(Shape(layers=2, width=96, mlp=64))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.mul_(0.5 + torch.rand_like(weight))
    folder = tmp_path_factory.mktemp("needle")
    export(model, folder, torch.float32)
    return model, folder


def test_logits_equal_transformers(exported: tuple[Needle, Path]) -> None:
    model, folder = exported
    document = make_document("many_keys", 3, 1024, 1)
    text = f"{document.text} {document.questions[0].text}"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert ids[0].tolist() == vocab.encode(text)
    assert tokenizer.decode(ids[0]) == text
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(model.logits(model(ids)[0]), theirs(ids).logits, atol=2e-4, rtol=2e-4)


def test_cache_and_reload_change_nothing(exported: tuple[Needle, Path]) -> None:
    model, folder = exported
    again = load(folder, torch.float32, "cpu")
    ids = torch.tensor([vocab.encode(make_document("copy_span", 1, 1024, 1).text)])
    with torch.no_grad():
        whole = model(ids)[0]
        _, cache = again(ids[:, :1000], keep=True)
        rest, cache = again(ids[:, 1000:1010], cache, keep=True)
        more, _ = again(ids[:, 1010:], cache)
    torch.testing.assert_close(torch.cat([rest, more], 1), whole[:, 1000:], atol=1e-4, rtol=1e-4)
