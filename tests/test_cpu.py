"""The CPU backend passes the battery."""

from typing import ClassVar

import pytest
import torch

from battery import Battery

SUMS = "torch's fused CPU backward adds dK and dV up in 16 bits over its blocks of query rows"


class TestCpu(Battery):
    backend = "cpu"
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
    known: ClassVar[dict[str, str]] = {
        "bfloat16-S127x129-h4k2-D128v64-padding&window-transposed-sum-sink": SUMS,
        "bfloat16-S1023x1024-h2k2-D64v64-causal-plain-out+lse": SUMS,
    }

    # Scales below zero, and inputs that are not finite, do not take the fused kernel: right, but
    # rounded differently.

    @pytest.mark.xfail(reason="scales below zero take the unfused path", strict=True)
    @pytest.mark.parametrize("mask", Battery.INVARIANT)
    def test_negated_queries_with_negated_scale(self, dtype: torch.dtype, mask: str) -> None:
        super().test_negated_queries_with_negated_scale(dtype, mask)

    @pytest.mark.xfail(reason="inputs that are not finite take the unfused path", strict=True)
    @pytest.mark.parametrize("mask", Battery.UNSEEN)
    def test_nan_that_nothing_sees_changes_nothing(self, dtype: torch.dtype, mask: str) -> None:
        super().test_nan_that_nothing_sees_changes_nothing(dtype, mask)

    @pytest.mark.xfail(reason="inputs that are not finite take the unfused path", strict=True)
    def test_nan_in_packed_neighbours_changes_nothing(self, dtype: torch.dtype) -> None:
        super().test_nan_in_packed_neighbours_changes_nothing(dtype)
