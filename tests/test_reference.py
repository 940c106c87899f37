"""The reference passes the battery too: two implementations that share no code agree with it."""

import torch

from battery import Battery


class TestReference(Battery):
    backend = "reference"
    dtypes = (torch.float64, torch.float32)
    any_device = True
