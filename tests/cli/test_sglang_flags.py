"""What jobs read off the flags that they pass on to SGLang."""

import pytest

from sglang_ext.cli.arguments import checkpoint_options, names_cpu


@pytest.mark.parametrize(
    ("flags", "cpu"),
    [
        ([], False),
        (["--device", "cpu"], True),
        (["--device=cpu", "--dtype", "float32"], True),
        (["--device", "cuda"], False),
        (["--device", "cuda", "--device=cpu"], True),
        (["--dtype", "cpu"], False),
        (["--device"], False),
    ],
)
def test_the_device(flags: list[str], cpu: bool) -> None:
    assert names_cpu(flags) == cpu


def test_revision_and_download_folder() -> None:
    assert checkpoint_options(["--revision=v2", "--download-dir", "/x"]) == ("v2", "/x")
    assert checkpoint_options(["--page-size", "16"]) == (None, None)
