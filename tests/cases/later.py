"""Public reports that have no test yet, and what is missing for one."""

CACHE = "attention with a key-value cache: pages, splits, decode"
FP8 = "FP8"
GPU = "kernels on a GPU"
INSTALL = "kernels compiled at run time"

WAITING = {
    "B008": CACHE,
    "B029": f"{CACHE}; {FP8}",
    "B042": f"{GPU}, about 24 GiB",
    "B043": CACHE,
    "B048": CACHE,
    "B049": "kernels for Metal",
    "B076": CACHE,
    "B078": GPU,
    "B080": FP8,
    "B082": FP8,
    "B083": FP8,
    "B085": FP8,
    "B086": FP8,
    "B101": f"{CACHE}; graph capture",
    "B103": f"{GPU}: graph capture",
    "B104": f"{GPU}: two of them",
    "B114": INSTALL,
    "B115": INSTALL,
    "B116": INSTALL,
    "B118": INSTALL,
    "B119": INSTALL,
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
    "B019": f"{GPU}: offsets changed after graph capture",
    "B044": f"{GPU}: a whole mask of 65537²",
    "B045": f"{GPU}: a whole mask of 46341²",
    "B047": f"{GPU}: both sides long",
    "B075": f"{GPU}: while it is busy",
    "B105": f"{GPU}: streams",
    "B151": f"{INSTALL}: a broken compiler",
}
