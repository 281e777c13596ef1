"""What sampled negatives, the filter and joined classes did to the error of trained networks (docs/fidelity.md).

The error is 1 - TAR at FAR 1e-5, over that of the same training with all classes in each step: geometric means over the
seeds of benchmarks/results/fidelity. tests/bench/test_study.py computes them again.
"""

FILTER = 0.4  # --interclass-filtering-threshold
# Without its rate and decay it gets the backbone's, which suit another optimizer.
ADAGRAD = "--head-optimizer adagrad --head-lr 0.1 --head-weight-decay 0"
TWICE = 2 / 3  # of the classes of the set "split" have another one of the same character
ERRORS = {
    "clean": {
        "0.3": 1.2, "0.1": 1.47, "0.03": 1.76, "rising": 1.38, "hard": 1.43, "exact": 1.07, "exact-0.03": 1.11,
        "adagrad": 1.06, "adagrad-all": 0.92, "adagrad-hard": 0.97, "filter": 0.92,
    },
    "split": {
        "0.3": 1.06, "0.1": 1.24, "0.03": 1.55, "exact": 0.94, "adagrad": 0.88, "adagrad-all": 0.96,
        "adagrad-hard": 0.89, "filter": 0.77,
    },
    "long": {
        "0.1": 1.5, "exact": 1.31, "adagrad": 1.38, "adagrad-all": 0.99, "adagrad-hard": 1.18, "adagrad-rising": 1.34,
    },
}  # fmt: skip
# 95 % intervals over the seeds, of those that hold 1: no difference is shown.
HOLD_1 = {
    "clean": {"adagrad": "0.89 to 1.25", "adagrad-all": "0.80 to 1.06", "adagrad-hard": "0.86 to 1.11"},
    "split": {"0.3": "0.99 to 1.15", "adagrad-all": "0.85 to 1.09"},
    "long": {"adagrad-all": "0.96 to 1.01", "adagrad-hard": "0.99 to 1.39"},
}
LOOK_ALIKE = 0.03  # of the classes of "split" that have none are found to be like another one (docs/data.md)
FEW = 0.05  # such classes are no reason to do anything
JOINED = 0.68  # of "split": with one class instead of two


def of_sampling(similar: float) -> str:
    """Returns what the rates cost. similar: the share of classes that are like another one; the nearer of two sets that
    were measured counts."""
    twice = similar >= TWICE / 2
    labels = f"characters, {TWICE:.0%} of the classes like another one" if twice else "12,000 characters, right labels"
    errors = _errors("split" if twice else "clean")
    resting = ", ".join(f"{errors[rate]} at rate {rate}" for rate in ("0.3", "0.1", "0.03"))
    return (
        f"Measured ({labels}; AdamW): sampling multiplied the error at FAR 1e-5 by {errors['exact']} at rate 0.1 (the "
        f"default, as arcface_torch trains), {errors['adagrad']} with {ADAGRAD}, {errors['adagrad-hard']} with these "
        f"and --hard-negatives 5; where centres rest (--head-catch-up none, as InsightFace's MXNet trainer has it) by "
        f"{resting}. {of_many_images()} "
        "(intervals that hold 1: no difference is shown; docs/fidelity.md)."
    )


def _errors(name: str) -> dict[str, str]:
    """Returns the errors of a set, with their interval if that holds 1."""
    unsure = HOLD_1[name]
    return {arm: f"{error:g} ({unsure[arm]})" if arm in unsure else f"{error:g}" for arm, error in ERRORS[name].items()}


def of_many_images() -> str:
    """Returns, without a full stop, what a rate of 0.1 costs if a training sees each class more often."""
    errors = _errors("long")
    return (
        "Where a training sees each class 56 times instead of 14 (4,000 characters, right labels), rate 0.1 had "
        f"{errors['exact']} times the error, {errors['adagrad']} with Adagrad, {errors['adagrad-hard']} with Adagrad "
        f"and --hard-negatives 5, {errors['0.1']} where centres rest"
    )


def of_resting_centres() -> str:
    """Returns what sampling costs where centres have momentum and rest."""
    errors = _errors("clean")
    return (
        "--head-catch-up none: centres that are not sampled rest, and their momentum with them. On 12,000 characters a "
        f"rate of 0.1 had {errors['0.1']} times the error of all classes so, and {errors['exact']} times with "
        "--head-catch-up exact, the default. It cannot be changed later (docs/fidelity.md)"
    )


def of_similar_classes(similar: float) -> str:
    """Returns what to do about this share of classes that are like another one."""
    if similar < FEW:
        return f"So few are no reason to act: of characters that were all different {LOOK_ALIKE:.0%} were such."
    return (
        "Look at some of those classes, and give two that are one the same name (docs/data.md), or set "
        f"--interclass-filtering-threshold {FILTER}: where {TWICE:.0%} of the classes were such, that multiplied the "
        f"error by {JOINED:g} and {ERRORS['split']['filter']:g} (docs/fidelity.md)."
    )
