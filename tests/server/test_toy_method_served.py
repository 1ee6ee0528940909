"""A method that the sources do not know is served. What is checked stands in a command, which a GPU's machine can run
without pytest.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests import toy_method_served

pytestmark = pytest.mark.full


def test_a_method_of_the_tests_is_served_by_an_entry_point_of_its_own(serve: Any) -> None:
    serve.close()
    counted = toy_method_served.serve()
    assert counted["sparse_rows, all kept"] > 0
    assert counted["sparse_rows, some kept"] > 0
