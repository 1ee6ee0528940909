"""What is released: an sdist, the wheel that it builds, an image and a compose file."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_ext import __version__
from tests.house_report import ROOT, SOURCES
from tests.test_house import project_files

NAME = f"sglang_ext-{__version__}"


def built(tree: Path, target: str, folder: Path) -> Path:
    """The one file that a build of a tree leaves in a folder."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, cwd=tree, check=True, capture_output=True, text=True)
    (found,) = folder.iterdir()
    return found


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def unpacked(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return folder / NAME


@pytest.fixture(scope="module")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(unpacked, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", target, wheel], check=True, capture_output=True, text=True)
    return target


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def sources() -> dict[str, bytes]:
    """Tracked and new files of the packages, by their names in a wheel."""
    files = project_files()
    return {
        str(path.relative_to(root)): path.read_bytes()
        for package, root in SOURCES.items()
        for path in files
        if path.is_relative_to(root / package)
    }


def test_the_wheel_of_the_sdist_is_that_of_the_checkout_and_holds_the_sources_alone(
    wheel: Path, tmp_path: Path
) -> None:
    found = contents(wheel)
    assert found == contents(built(ROOT, "wheel", tmp_path))
    about = {name for name in found if name.startswith(f"{NAME}.dist-info/")}
    assert {name: found[name] for name in found.keys() - about} == sources()
    assert {Path(name).name for name in about} == {"METADATA", "WHEEL", "entry_points.txt", "LICENSE", "RECORD"}


def test_the_sdist_holds_what_the_wheel_is_built_of(unpacked: Path) -> None:
    tops = {path.relative_to(unpacked).parts[0] for path in unpacked.rglob("*") if path.is_file()}
    own = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "PKG-INFO", ".gitignore"}
    assert tops == {"sglang_ext", "kernels", "index_store", *own}


def run(installed: Path, *command: str) -> str:
    """What a command says that finds the installed packages, and neither the checkout nor its metadata before them."""
    env = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(command, cwd=installed.parent, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_the_installed_wheel_has_its_command_and_its_plugins(installed: Path) -> None:
    assert run(installed, str(installed / "bin" / "sglang-ext"), "--version") == f"sglang-ext {__version__}"
    code = (
        "import importlib.metadata, prefix_index, prefix_kernels.types, sglang_ext\n"
        "ours = importlib.metadata.distribution('sglang-ext')\n"
        "modules = prefix_index, prefix_kernels.types, sglang_ext\n"
        "places = [str(ours.locate_file('')), *(one.__file__ for one in modules)]\n"
        f"assert all(place.startswith({str(installed)!r}) for place in places), places\n"
        "loaded = {one.name: one.load() for one in ours.entry_points if one.group == 'sglang.srt.plugins'}\n"
        "print(ours.version, *(f'{name}={one.__module__}.{one.__name__}' for name, one in sorted(loaded.items())))\n"
    )
    plugins = "sparse_attn=sglang_ext.plugin.register sparse_attn_cpu=sglang_ext.compat.cpu.register"
    assert run(installed, sys.executable, "-c", code).splitlines()[-1] == f"{__version__} {plugins}"


@pytest.fixture
def compose() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "compose.yml").read_text())


def test_the_image_is_of_the_oldest_supported_release_and_gets_what_a_wheel_needs(
    compose: dict[str, Any], unpacked: Path
) -> None:
    from sglang_ext.compat.versions import SUPPORTED

    image = f"lmsysorg/sglang:v{SUPPORTED[0]}"
    assert f"ARG SGLANG_IMAGE={image}\n" in (ROOT / "Dockerfile").read_text()
    assert compose["services"]["sglang"]["build"]["args"]["SGLANG_IMAGE"] == f"${{SGLANG_IMAGE:-{image}}}"
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept == {path.name for path in unpacked.iterdir()} - {"PKG-INFO", ".gitignore"}


def test_the_composed_server_takes_its_flags_and_writes_into_its_volume(
    compose: dict[str, Any], tmp_path: Path
) -> None:
    from sglang_ext.config import make_settings
    from sglang_ext.options import Build

    server = compose["services"]["sglang"]
    command = server["command"]
    settings = make_settings(command[command.index("--sparse-attn-config") + 1], str(tmp_path))
    assert settings.config.build is Build.SHARED
    assert "--enable-metrics" in command
    assert any(flag.startswith("--admin-api-key=${ADMIN_KEY:?") for flag in command), "it does not start without one"
    assert "store:/store" in server["volumes"]
    assert "ENV SGLANG_SPARSE_ATTN_STORE=/store\n" in (ROOT / "Dockerfile").read_text()


def test_prometheus_and_grafana_find_what_they_are_given(compose: dict[str, Any]) -> None:
    services, port = compose["services"], "30000"
    mounted = {
        name: Path(volume.split(":")[0])
        for name in ("prometheus", "grafana")
        for volume in services[name]["volumes"]
        if volume.startswith("./")
    }
    assert mounted == {"prometheus": Path("dashboards"), "grafana": Path("dashboards")}
    assert f"--port={port}" in services["sglang"]["command"]
    assert services["prometheus"]["network_mode"] == "service:sglang"
    configs = {name: yaml.safe_load(one["content"]) for name, one in compose["configs"].items()}
    (source,), (provider,) = configs["datasource"]["datasources"], configs["provider"]["providers"]
    assert source["url"] == "http://sglang:9090"
    assert f"./dashboards:{provider['options']['path']}:ro" in services["grafana"]["volumes"]
    assert {one["source"] for one in services["grafana"]["configs"]} == configs.keys()
    scraped = yaml.safe_load((ROOT / "dashboards" / "prometheus.yml").read_text())
    targets = [
        target for job in scraped["scrape_configs"] for one in job["static_configs"] for target in one["targets"]
    ]
    assert targets == [f"localhost:{port}"], "Prometheus shares the server's network"
