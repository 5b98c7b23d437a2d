"""Name the package to install for a module that cannot be imported."""

from __future__ import annotations

import re

# Import names of packages, and the extra of ours that installs each.
EXTRAS = {
    "monai": "monai",
    "dynamic_network_architectures": "nnunet",
    "diffusers": "diffusers",
    "transformers": "transformers",
    "torchvision": "torchvision",
    "timm": "timm",
    "torchao": "quantize",
}
# Packages that pip knows by another name than the module.
_PACKAGES = {
    "PIL": "pillow",
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python",
    "dateutil": "python-dateutil",
    "dotenv": "python-dotenv",
    "git": "gitpython",
    "hydra": "hydra-core",
    "pywt": "PyWavelets",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "umap": "umap-learn",
    "yaml": "pyyaml",
}
_LOCAL = "start in the folder that holds it"
_NO_MODULE = re.compile(r"No module named '(\w+)")


def install_remedy(module: str, *, imported: bool = False) -> str:
    """Return how to get the missing `module`; an `imported` one was named by other code, not by the user."""
    name = module.partition(".")[0]
    if name in EXTRAS:
        return f"install the extra: pip install 'torch-prepare[{EXTRAS[name]}]'"
    if name in _PACKAGES:
        return f"install it: pip install {_PACKAGES[name]}"
    # A name that the user wrote may be misspelt: it is not advised to install any package of that name.
    return (
        f"install it: pip install {name}, or {_LOCAL}" if imported else f"install it, or {_LOCAL}"
    )


def missing_module(text: str) -> str | None:
    """Return the module that an error message says is missing, as in `No module named 'einops'`."""
    found = _NO_MODULE.search(text)
    return found[1] if found else None
