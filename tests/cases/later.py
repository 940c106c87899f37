"""Public reports that have no test yet, and what is missing for one."""

CACHE = "attention with a key-value cache: pages, splits, decode"
FP8 = "FP8"
GRADIENTS = "gradients on a GPU"
TILES = "tile maps on a GPU"

WAITING = {
    "B008": CACHE,
    "B029": f"{CACHE}; {FP8}",
    "B043": CACHE,
    "B048": CACHE,
    "B049": "kernels for Metal",
    "B076": CACHE,
    "B080": FP8,
    "B082": FP8,
    "B083": FP8,
    "B085": FP8,
    "B086": FP8,
    "B101": f"{CACHE}; graph capture",
    "B125": CACHE,
    "B126": CACHE,
    "B127": CACHE,
    "B129": CACHE,
    "B130": CACHE,
    "B131": CACHE,
    "B132": CACHE,
    "B133": CACHE,
    "B135": CACHE,
}

# Tested, but for the part named here.
PARTLY = {
    "B042": GRADIENTS,
    "B044": TILES,
    "B045": TILES,
    "B075": GRADIENTS,
}
