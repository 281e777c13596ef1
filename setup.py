"""What setup.cfg cannot say: the top-level folder recipes/ is installed as the package partial_fc.recipes."""

from setuptools import find_packages, setup

RECIPES = [f"partial_fc.{name}" for name in find_packages(include=["recipes", "recipes.*"])]
setup(
    packages=find_packages(include=["partial_fc", "partial_fc.*"]) + RECIPES,
    package_dir={"partial_fc.recipes": "recipes"},
)
