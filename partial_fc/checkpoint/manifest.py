"""The valid values of a manifest, besides the head's facts: its checksum detects damage, not what somebody wrote."""

from collections.abc import Callable, Mapping
from typing import Any

MOST_RANKS = 1 << 16
_MOST = 1 << 53  # samples or steps: more than any run, and safe in arithmetic


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300


def _facts(value: Any) -> bool:
    return isinstance(value, Mapping)


def _left_out(value: Any) -> bool:
    pairs = value if isinstance(value, list) else [None]
    return all(isinstance(pair, list) and len(pair) == 2 and all(map(_whole, pair)) for pair in pairs)


def _configuration(value: Any) -> bool:
    lengths = (value.get(name) for name in ("epochs", "max_steps")) if _facts(value) else (True,)
    return all(length is None or _number(length) for length in lengths)


def _scaler(value: Any) -> bool:
    return _facts(value) and _number(value.get("scale")) and value["scale"] > 0 and _whole(value.get("clean_steps"))


def _scores(value: Any) -> bool:
    return _facts(value) and all(score is None or _number(score) for score in value.values())


def _texts(value: Any) -> bool:
    return _facts(value) and all(isinstance(text, str) for text in value.values())


_WHOLE = f"a whole number from 0 to {_MOST:,}"
# Key -> valid values, and a description. None is JSON's NaN or infinity, or no value.
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "step": (_whole, _WHOLE),
    "world_size": (lambda value: type(value) is int and 0 <= value <= MOST_RANKS, f"at most {MOST_RANKS:,} ranks"),
    "position": (_whole, _WHOLE),
    "num_overflows": (_whole, _WHOLE),
    "left_out": (_left_out, "a list of [begin, end]"),
    "best": (lambda value: value is None or _number(value) or _scores(value), "scores by name"),
    "best_score": (lambda value: value is None or _number(value), "a number"),
    "score": (lambda value: value is None or _number(value), "a number"),
    "loss_scaler": (_scaler, "scale, above 0, and clean_steps"),
    "recipe": (lambda value: isinstance(value, str), "a name"),
    "contract": (_texts, "texts by name"),
    "configuration": (_configuration, "values by flag, epochs and max_steps numbers"),
}


def problem(manifest: Mapping[str, Any]) -> str:
    """Returns the first invalid key, and what was expected; "" if none. Keys may be missing."""
    for key, (is_right, expected) in _RULES.items():
        if key in manifest and not is_right(manifest[key]):
            return f"{key} is {str(manifest[key])[:80]!r}; expected {expected}"
    return ""
