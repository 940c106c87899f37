"""Modules beside the tests that hold assertions of their own are rewritten as tests are."""

import pytest

pytest.register_assert_rewrite("battery", "plain", "arena", "matrix")
