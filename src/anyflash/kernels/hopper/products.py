"""Products of tiles on the tensor cores (wgmma), started by one warpgroup.

A tile may consist of panels, boxes of TMA side by side: those of Q and K are what a product sums
over, those of V are columns of its result.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def multiply(q_tile, k, slot, s_zero):
    """S = Q K^T, started."""
    s = warpgroup_mma(
        q_tile[0], k.panel(slot, 0).permute((1, 0)), s_zero, use_acc=False, is_async=True
    )
    for n in gl.static_range(1, k.PANELS):
        s = warpgroup_mma(q_tile[n], k.panel(slot, n).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def accumulate(p, v, slot, o):
    """O += P V, started, for each panel."""
    started = ()
    for n in gl.static_range(v.PANELS):
        started = started + (warpgroup_mma(p, v.panel(slot, n), o[n], is_async=True),)  # noqa: RUF005
    return started


@gluon.jit
def finish(started):
    """Waits for all products."""
    if len(started) == 1:
        return (warpgroup_mma_wait(0, [started[0]]),)
    else:
        return warpgroup_mma_wait(0, started)
