"""The forward pass on a Hopper card against cuDNN and FlashAttention-2; backward in `backward`.

`rows` says what is measured, `anchors` how fast others are, `peers` against whom, `check` whether
it is right, `timing` and `power` how much; `suite` does it all for a row, `ablations` for variants
of the kernel, `goals` holds the whole run against its bars and `render` shows it.
"""
