"""What setup.cfg cannot say: the top-level folder recipes/ is installed within the package partial_fc."""

from setuptools import find_packages, setup

BESIDE = ("recipes",)
INSIDE = [
    f"partial_fc.{name}"
    for name in find_packages(include=[f"{folder}{rest}" for folder in BESIDE for rest in ("", ".*")])
]
setup(
    packages=find_packages(include=["partial_fc", "partial_fc.*"]) + INSIDE,
    package_dir={f"partial_fc.{folder}": folder for folder in BESIDE},
)
