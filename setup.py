"""Packaging: the five top-level folders are installed as `isozyme.core`, `isozyme.parallel`, and so on.

Everything that can be declared is in pyproject.toml; only the mapping from folders to packages is computed
here. The relative links in src/isozyme/ say the same to tools that read the source tree (editable installs,
mypy, pytest).
"""

from setuptools import find_packages, setup

TREES = ("core", "parallel", "moe", "models", "launch")

packages = ["isozyme"]
for tree in TREES:
    packages += [f"isozyme.{tree}", *(f"isozyme.{tree}.{name}" for name in find_packages(tree))]

setup(
    packages=packages,
    package_dir={"isozyme": "src/isozyme", **{f"isozyme.{tree}": tree for tree in TREES}},
    include_package_data=False,
    package_data={
        "isozyme": ["py.typed"],
        "isozyme.core": ["sample/*"],
        "isozyme.moe.experts": ["measured_on/*.json"],
        "isozyme.launch": ["recipes/*.yaml", "scripts/*"],
    },
)
