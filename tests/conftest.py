"""Settings for all tests, before torch is imported."""

import os

import pytest

# torch.compile keeps generated code between runs under a key that knows nothing of our operators:
# after a change of their strides it would run code made for the old ones.
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

# Modules beside the tests that hold assertions of their own are rewritten as tests are.
pytest.register_assert_rewrite("battery", "plain", "arena", "matrix")

pytest_plugins = ["gluon_plugin"]
