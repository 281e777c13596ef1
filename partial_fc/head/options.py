"""Checks the options of PartialFC: their values and their combinations."""

from collections.abc import Callable, Collection
from numbers import Real

from partial_fc.head.margin import Margin
from partial_fc.head.selection.sampling import Quota

# The denominators of the ranks are added as sums of exp(logit) in float64, whose range ends at exp(709): with logits
# bounded by this, no maximum has to be agreed upon first, and no row can under- or overflow.
_LARGEST_LOGIT = 600.0


def check_options(
    margins: Collection[Margin],
    sample_rates: Collection[float],
    *,
    interclass_filtering_threshold: float | None,
    sub_centres: int,
    label_smoothing: float,
    sampling_correction: bool,
    hard_negatives: bool,
    quota: Quota = "negatives",
    spell: Callable[[str], str] = str,
) -> None:
    """Raises ValueError for options of PartialFC that do not go together. margins, sample_rates: of all steps. spell:
    what the user calls an option."""
    if sub_centres < 1:
        raise ValueError(f"{spell('sub_centres')} is {sub_centres}; expected at least 1")
    if not isinstance(label_smoothing, Real) or not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"{spell('label_smoothing')} is {label_smoothing!r}; expected 0 <= label_smoothing < 1")
    above = interclass_filtering_threshold
    if above is not None and not (isinstance(above, Real) and -1.0 <= above <= 1.0):
        raise ValueError(f"{spell('interclass_filtering_threshold')} is {above!r}; expected a cosine, -1 to 1, or none")
    margin = max(margins, key=lambda margin: margin.scale * margin.bound)
    if kinds := {type(other).__name__ for other in margins} - {type(margin).__name__}:
        raise ValueError(
            f"{spell('margin')}s of several kinds, {type(margin).__name__} and {', '.join(sorted(kinds))}: what one "
            "remembers between the steps is of no use to another; expected one kind"
        )
    if margin.scale * margin.bound > _LARGEST_LOGIT:
        raise ValueError(
            f"{spell('scale')} {margin.scale} allows logits up to {margin.scale * margin.bound:.0f}; "
            f"expected at most {_LARGEST_LOGIT:.0f}: choose a smaller scale"
        )
    smoothing_excludes = {
        spell("interclass_filtering_threshold"): interclass_filtering_threshold is not None,
        spell("sub_centres"): sub_centres > 1,
        spell("sampling_correction"): sampling_correction,
        _called(margin, spell): margin.needs_target_cosines,
    }
    for name, used in smoothing_excludes.items():
        if used and label_smoothing:
            raise ValueError(
                f"{spell('label_smoothing')} with {name}: which classes share the smoothed part, and with which "
                "logits, is not defined there; leave one of the two out"
            )
    for name, used in {"sampling_correction": sampling_correction, "hard_negatives": hard_negatives}.items():
        if used and min(sample_rates) == 1.0:
            raise ValueError(
                f"{spell(name)} without sampling: every class is active in every step; leave it out, or give a "
                f"{spell('sample_rate')} below 1"
            )
    if sampling_correction and quota == "insightface":
        raise ValueError(
            f"{spell('sampling_correction')} with {spell('quota')} insightface: how likely a class is to take part "
            "depends on the batch there, and may be 0; leave one of the two out"
        )


def _called(margin: Margin, spell: Callable[[str], str]) -> str:
    """Returns what the user calls a margin: CurricularFace, or --loss curricularface."""
    name, loss = type(margin).__name__, spell("loss")
    return name if loss == "loss" else f"{loss} {name.lower()}"


def check_several_labels(margin: Margin, label_smoothing: float, what: str, spell: Callable[[str], str] = str) -> None:
    """Raises ValueError for options that have no meaning where a row has several labels, or with `what`. spell: as of
    `check_options`."""
    excludes = {f"{_called(margin, spell)}, whose hard negatives are told by one target": margin.needs_target_cosines}
    excludes[f"{spell('label_smoothing')}, which gives one label its share"] = label_smoothing > 0
    for other, used in excludes.items():
        if used:
            raise ValueError(f"{what} with {other}; leave one of the two out")
