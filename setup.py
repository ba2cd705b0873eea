"""Packaging: the five top-level folders are installed as `isozyme.core`, `isozyme.parallel`, and so on."""

from setuptools import find_packages, setup

TREES = ("core", "parallel", "moe", "models", "launch")

packages = ["isozyme"]
for tree in TREES:
    packages += [f"isozyme.{tree}"] + [f"isozyme.{tree}.{name}" for name in find_packages(tree)]

setup(
    packages=packages,
    package_dir={"isozyme": "src/isozyme", **{f"isozyme.{tree}": tree for tree in TREES}},
    package_data={
        "isozyme": ["py.typed"],
        "isozyme.launch": ["recipes/*.yaml", "scripts/*"],
        "isozyme.core": ["sample/*"],
    },
    install_requires=[
        "torch>=2.11",
        "numpy>=1.26",
        "einops>=0.8",
        "jaxtyping>=0.3",
        "omegaconf>=2.3",
        "rich>=13.7",
        "safetensors>=0.5",
    ],
    entry_points={"console_scripts": ["isozyme=isozyme.launch.cli:main"]},
)
