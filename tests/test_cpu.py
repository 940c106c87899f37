"""The CPU backend passes the battery."""

import torch

from battery import Battery


class TestCpu(Battery):
    backend = "cpu"
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
    # Its gradient takes torch's elementwise operations, which compute the last few elements of a
    # tensor with other instructions: a unit in the last place, where a batch is longer or shorter.
    lse_ignores_neighbours = False
