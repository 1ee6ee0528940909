"""The documents say what the code does: seams, commands, settings, counters, links."""

from __future__ import annotations

import argparse
import importlib
import json
import re
from pathlib import Path

import pytest

from sglang_ext.cli import COMMANDS
from sglang_ext.cli.arguments import Parser
from sglang_ext.options import SparseAttnConfig

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def tables(text: str) -> list[list[list[str]]]:
    """The Markdown tables of a document: rows of cells, without header and rule."""
    found: list[list[list[str]]] = []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if not line.startswith("|"):
            continue
        if number == 0 or not lines[number - 1].startswith("|"):
            found.append([])
        # A bar inside backquotes would be a cell of its own to a Markdown renderer too.
        found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
    return [table[2:] for table in found]


def first_cells(table: list[list[str]]) -> list[str]:
    return [name for row in table for name in re.findall(r"`([^`]+)`", row[0])]


def table_with(text: str, name: str) -> list[list[str]]:
    return next(table for table in tables(text) if name in first_cells(table))


def shell_lines(text: str) -> list[str]:
    """The lines of the bash blocks, continued lines joined."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
    return [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def test_the_seam_table_is_the_list_of_seams() -> None:
    from sglang_ext.compat.seams import SEAMS

    documented = [tuple(cell.strip("`") for cell in row) for row in tables(text_of("docs/sglang-seams.md"))[0]]
    assert [row[:3] for row in documented] == [(s.target, s.kind.value.lower(), s.process) for s in SEAMS]
    assert all(reason for *_, reason in documented)


def test_the_cpu_table_is_what_the_cpu_plugin_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_ext.compat import cpu, versions

    hooked: list[tuple[str, str]] = []
    monkeypatch.setattr(cpu, "_no_accelerator", lambda: True)
    monkeypatch.setattr(cpu, "_stub_rope_operation", lambda: None)
    monkeypatch.setattr(versions, "installed", lambda: "0.5.16")
    monkeypatch.setattr(
        HookRegistry, "register", lambda target, hook, kind: hooked.append((target, kind.value.lower()))
    )
    for name in ("SGLANG_EXT_CPU_SHORT_EXTEND", "SGLANG_EXT_CPU_POISON"):
        monkeypatch.setenv(name, "1")
    cpu.register()
    documented = [
        (row[0].strip("`"), row[1])
        for row in tables(text_of("docs/sglang-seams.md"))[-1]
        if row[0].startswith("`sglang.")
    ]
    assert documented == hooked


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_make_target_and_script_in_the_documents_exists(document: Path) -> None:
    text, makefile = document.read_text(), text_of("Makefile")
    mentioned = re.findall(r"`make ([a-z-]+)`", text)
    mentioned += re.findall(r"^make ([a-z-]+)", "\n".join(shell_lines(text)), re.M)
    for target in mentioned:
        assert re.search(rf"^{target}:", makefile, re.M), f"{document.name} mentions make {target}"
    for script in re.findall(r"\b(?:tests/[\w/]+|(?<!tests/)(?:benchmarks|scripts)/\w+)\.py", text):
        assert (ROOT / script).exists(), f"{document.name} names {script}"


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    from sglang_ext.cli import main

    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def commands(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """The subcommands of a command; none for one that has none."""
    listed = help_of(capsys, *words).split("positional arguments:", 1)[-1].split("options:")[0]
    return re.findall(r"^    ([a-z]+)", listed, re.M)


def test_every_command_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    """Each one's help is what the reference page says."""
    names = commands(capsys)
    assert names
    for name in names:
        assert f"sglang-ext {name}" in "".join(map(text_of, ("README.md", "docs/operating.md", "docs/diagnosis.md")))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_sglang_ext_command_in_the_documents_is_accepted(
    document: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = commands(capsys)
    text = document.read_text()
    for line in [*shell_lines(text), *(found.replace("$ ", "") for found in re.findall(r"^\$ .*", text, re.M))]:
        if not line.startswith("sglang-ext "):
            continue
        ours = line.split(" #")[0].split(" -- ")[0].split()
        assert ours[1] in known, line
        nested = commands(capsys, ours[1])
        assert not nested or ours[2] in nested, line
        described = help_of(capsys, *ours[1 : 3 if nested else 2])
        for word in ours[2:]:
            if word.startswith("--"):
                assert re.search(rf"{word}\b", described), f"{document.name}: {word}"


def test_the_keys_of_an_index_in_json_are_documented() -> None:
    from prefix_index import IndexEntry
    from sglang_ext.cli.index.targets import fields
    from tests.prefix_index.samples import sample_identity

    entry = IndexEntry(identity=sample_identity(), nbytes=4096, created=0.0, build_seconds=0.0)
    documented = first_cells(table_with(text_of("docs/operating.md"), "digest"))
    assert sorted(documented) == sorted(fields(entry))


def test_the_fields_of_a_prompt_are_documented() -> None:
    from sglang_ext.calibration.prompts import CalibrationPrompt
    from sglang_ext.prefill.prompts import Prompt

    for document, key, kind in (
        ("docs/using.md", "extra_key", Prompt),
        ("docs/calibration.md", "question", CalibrationPrompt),
    ):
        assert sorted(first_cells(table_with(text_of(document), key))) == sorted(kind.__struct_fields__)


def test_server_flags_and_environment_are_documented() -> None:
    from sglang_ext import config

    for word in ("--sparse-attn ", "--sparse-attn-store", "--sparse-attn-config"):
        assert word in text_of("README.md")
    for name in (config.ENV_ENABLE, config.ENV_CONFIG, config.ENV_STORE):
        assert name in text_of("docs/using.md")


def test_the_reference_page_is_what_the_sources_say() -> None:
    """Every setting, parameter of a method, command and flag, each with its default."""
    from scripts import reference_page

    assert reference_page.page() == text_of("docs/reference.md"), "run python scripts/reference_page.py"
    assert sorted(reference_page.attributes(SparseAttnConfig)) == sorted(SparseAttnConfig.__struct_fields__)


def test_options_tell_their_defaults() -> None:
    from scripts import reference_page

    top = Parser(prog="sglang-ext")
    subcommands = top.add_subparsers()
    for name in COMMANDS:
        importlib.import_module(f"sglang_ext.cli.{name}").add_parser(subcommands)
    actions = [(parser.prog, action) for parser, _ in reference_page.parsers(top) for action in parser._actions]
    none = (None, False, "", argparse.SUPPRESS)
    told = [(prog, action) for prog, action in actions if action.option_strings and action.default not in none]
    assert len(told) > 20
    assert [(prog, action.dest) for prog, action in told if "default" not in (action.help or "")] == []


def test_every_method_and_fallback_reason_is_documented() -> None:
    from sglang_ext.methods import METHODS
    from sglang_ext.metrics import REASONS
    from sglang_ext.options import DecodePath

    assert sorted(first_cells(table_with(text_of("docs/operating.md"), "no_index"))) == sorted(REASONS)
    ways = first_cells(table_with(text_of("docs/operating.md"), '"auto"'))
    assert sorted(ways) == sorted(f'"{way.value}"' for way in DecodePath)
    assert all(f"`{name}`" in text_of("docs/selection.md") for name in METHODS)


def test_every_counter_and_figure_of_the_store_is_documented(tmp_path: Path) -> None:
    from sglang_ext.config import make_settings
    from sglang_ext.metrics import Counters
    from sglang_ext.prefix.directory import PrefixDirectory
    from tests.prefix_index.samples import sample_model

    watch = PrefixDirectory(make_settings(None, str(tmp_path)), sample_model(), "a profile")
    documented = first_cells(table_with(text_of("docs/operating.md"), "hits"))
    assert {*Counters(2).snapshot(), *watch.snapshot()} <= set(documented)
    watch.close()


def test_every_exported_metric_is_documented_with_its_label() -> None:
    from sglang_ext.metrics import METRICS

    exported = {
        one.name + ("" if one.gauge else "_total") + (f"{{{one.label}}}" if one.label else "") for one in METRICS
    }
    assert exported == set(first_cells(table_with(text_of("docs/monitoring.md"), "hit_total")))


def test_the_supported_versions_are_the_same_everywhere() -> None:
    from sglang_ext.compat.versions import SUPPORTED

    ends, between = (
        re.search(rf"^{name} := (.*)$", text_of("Makefile"), re.M).group(1).split()
        for name in ("SGLANG_VERSIONS", "BETWEEN")
    )
    assert [ends[0], *between, ends[1]] == list(SUPPORTED)
    for version in ends:
        assert version in text_of("README.md")
        assert f".venv-{version}" in text_of("CONTRIBUTING.md")


def test_releases_and_their_seams_are_documented() -> None:
    """That each seam is there, `make test-RELEASE` finds out."""
    from sglang_ext.compat.seams import SEAMS
    from sglang_ext.compat.versions import SUPPORTED

    rows = {row[0]: int(row[1]) for row in tables(text_of("docs/releases.md"))[0]}
    assert rows == {
        release: sum(SUPPORTED.index(seam.since) <= SUPPORTED.index(release) for seam in SEAMS) for release in SUPPORTED
    }


def test_the_demo_configuration_fits_the_shipped_model() -> None:
    from sglang_ext.config import parse_profiled

    config, _ = parse_profiled(f"@{ROOT / 'scripts' / 'demo_config.json'}", None)
    model = json.loads(text_of("models/needle/config.json"))
    assert len(config.layer_plan) in (0, model["num_hidden_layers"])


def anchors(document: Path) -> set[str]:
    """Of a document's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)", re.sub(r"```.*?```", "", document.read_text(), flags=re.S), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", document.read_text()):
        if "://" not in target:
            file = document.parent / target if target else document
            assert file.exists(), f"{document.name} links to {target}"
            assert not anchor or anchor in anchors(file), f"{document.name} links to {target}#{anchor}"


def test_pages_that_the_sources_name_exist() -> None:
    for source in [
        path for folder in ("sglang_ext", "kernels", "index_store", "tests") for path in (ROOT / folder).rglob("*.py")
    ]:
        for page in re.findall(r"docs/[\w-]+\.md", source.read_text()):
            assert (ROOT / page).exists(), f"{source} names {page}"
