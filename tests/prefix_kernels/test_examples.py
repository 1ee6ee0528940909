"""The examples in docstrings run."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["merge_state", "prefix_attention", "low_bit"])
def test_docstring_examples(name):
    module = importlib.import_module(f"prefix_kernels.{name}.api")
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
