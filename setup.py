"""The list of packages; everything else is in pyproject.toml.

Four folders of the repository become two import packages (`package-dir` in pyproject.toml). Their subpackages are
found here, because setuptools' own `packages.find` cannot give a found package another name.
"""

from setuptools import find_packages, setup

ROOTS = {
    "hf_memmix": "hf_memmix",
    "hf_memmix.conversion": "conversion",
    "hf_memmix.training": "training",
    "hf_memmix_kernels": "kernels/torch-ext/hf_memmix_kernels",
}

# the experiments of the papers run in a checkout, which holds their results
NOT_INSTALLED = ["experiments", "experiments.*"]

setup(
    packages=[
        name
        for root, folder in ROOTS.items()
        for name in [root, *(f"{root}.{sub}" for sub in find_packages(folder, exclude=NOT_INSTALLED))]
    ]
)
