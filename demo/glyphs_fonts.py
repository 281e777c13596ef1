"""The typefaces of the glyph set, their characters, and the choice of characters.

A class is a Unicode character: a CJK ideograph, one of extension A, or a Hangul syllable.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fontTools.ttLib import TTCollection, TTFont


@dataclass(frozen=True)
class Typeface:
    """A typeface of a Debian package. `face` selects a font of a collection (.ttc) by its full name."""

    name: str
    package: str
    file: str
    face: str
    scripts: frozenset[str] = frozenset({"han", "hangul"})


_HAN, _HANGUL = frozenset({"han"}), frozenset({"hangul"})

# An image's seed uses its typeface's index in this list: append new typefaces. Un Dotum is omitted because WenQuanYi
# Zen Hei draws Hangul with its outlines.
TYPEFACES = (
    Typeface("noto-sans", "fonts-noto-cjk", "NotoSansCJK-Regular.ttc", "Noto Sans CJK SC"),
    Typeface("noto-sans-bold", "fonts-noto-cjk", "NotoSansCJK-Bold.ttc", "Noto Sans CJK SC Bold"),
    Typeface("noto-serif", "fonts-noto-cjk", "NotoSerifCJK-Regular.ttc", "Noto Serif CJK SC"),
    Typeface("noto-serif-bold", "fonts-noto-cjk", "NotoSerifCJK-Bold.ttc", "Noto Serif CJK SC Bold"),
    Typeface("zenhei", "fonts-wqy-zenhei", "wqy-zenhei.ttc", "WenQuanYi Zen Hei"),
    Typeface("microhei", "fonts-wqy-microhei", "wqy-microhei.ttc", "WenQuanYi Micro Hei"),
    Typeface("uming", "fonts-arphic-uming", "uming.ttc", "AR PL UMing CN", _HAN),
    Typeface("ukai", "fonts-arphic-ukai", "ukai.ttc", "AR PL UKai CN", _HAN),
    Typeface("nanum-gothic", "fonts-nanum", "NanumGothic.ttf", "NanumGothic", _HANGUL),
    Typeface("nanum-myeongjo", "fonts-nanum", "NanumMyeongjo.ttf", "NanumMyeongjo", _HANGUL),
    Typeface("un-batang", "fonts-unfonts-core", "UnBatang.ttf", "Un Batang", _HANGUL),
    Typeface("un-gungseo", "fonts-unfonts-core", "UnGungseo.ttf", "Un Gungseo", _HANGUL),
    Typeface("un-graphic", "fonts-unfonts-core", "UnGraphic.ttf", "Un Graphic", _HANGUL),
)
CHINESE = tuple(i for i, typeface in enumerate(TYPEFACES) if "han" in typeface.scripts)
NEVER_TRAINED = next(i for i, typeface in enumerate(TYPEFACES) if typeface.name == "ukai")
LEAST_TYPEFACES = 5


@dataclass(frozen=True)
class Font:
    """An installed typeface. codes: the characters of the three ranges in its table."""

    path: Path
    index: int
    version: str
    codes: frozenset[int]


def find_fonts(root: Path, typefaces: Sequence[Typeface] = TYPEFACES) -> list[Font]:
    """Returns the font of each typeface below a folder. Raises ValueError that names missing packages."""
    paths = {path.name: path for path in sorted(root.rglob("*")) if path.suffix in (".ttc", ".ttf")}
    missing = [typeface for typeface in typefaces if typeface.file not in paths]
    if missing:
        packages = " ".join(sorted({typeface.package for typeface in missing}))
        raise ValueError(
            f"{root}: no {', '.join(typeface.file for typeface in missing)} below this folder; "
            f"the glyph set needs these fonts. Install them with: apt-get install {packages}"
        )
    return [_open(typeface, paths[typeface.file]) for typeface in typefaces]


def script(code: int) -> str | None:
    if 0x3400 <= code <= 0x4DBF or 0x4E00 <= code <= 0x9FFF:
        return "han"
    return "hangul" if 0xAC00 <= code <= 0xD7A3 else None


def characters(fonts: list[Font]) -> dict[int, tuple[int, ...]]:
    """Maps every character of at least LEAST_TYPEFACES typefaces to their indices in TYPEFACES; sorted by code."""
    typefaces: dict[int, list[int]] = {}
    for index, font in enumerate(fonts):
        for code in font.codes:
            typefaces.setdefault(code, []).append(index)
    return {code: tuple(typefaces[code]) for code in sorted(typefaces) if len(typefaces[code]) >= LEAST_TYPEFACES}


def choose(
    typefaces: Mapping[int, tuple[int, ...]], num_classes: int, num_unseen: int, seed: int
) -> tuple[list[int], list[int]]:
    """Returns (characters of the classes in class order, characters held out for the tests).

    Both are drawn first from the characters of all Chinese typefaces. The held-out ones depend on the seed and their
    own number only, and the classes of a smaller set are the first classes of a larger one.
    """
    whole = [code for code, indices in typefaces.items() if set(CHINESE) <= set(indices)]
    rest = [code for code, indices in typefaces.items() if not set(CHINESE) <= set(indices)]
    if num_unseen > len(whole):
        raise ValueError(f"num_unseen {num_unseen}: only {len(whole)} characters stand in all Chinese typefaces")
    if num_classes + num_unseen > len(typefaces):
        raise ValueError(
            f"num_classes {num_classes}, num_unseen {num_unseen}: {len(typefaces)} characters stand in "
            f"{LEAST_TYPEFACES} typefaces or more; ask for at most {len(typefaces) - num_unseen} classes"
        )
    order = _shuffled(whole, seed, 0) + _shuffled(rest, seed, 1)
    return order[num_unseen : num_unseen + num_classes], order[:num_unseen]


def _shuffled(codes: list[int], seed: int, stream: int) -> list[int]:
    import torch  # takes seconds, not needed for --help

    from partial_fc import counter_rng

    key = counter_rng.derive_key(seed, stream)
    return [codes[i] for i in counter_rng.permute(torch.arange(len(codes)), len(codes), key).tolist()]


def _open(typeface: Typeface, path: Path) -> Font:
    fonts = TTCollection(path, lazy=True).fonts if path.suffix == ".ttc" else [TTFont(path, lazy=True)]
    names = [font["name"].getDebugName(4) for font in fonts]
    if typeface.face not in names:
        raise ValueError(f"{path}: got faces {names}, expected {typeface.face!r}; reinstall {typeface.package}")
    index = names.index(typeface.face)
    codes = frozenset(code for code in fonts[index].getBestCmap() if script(code) in typeface.scripts)
    version = str(fonts[index]["name"].getDebugName(5)).strip()
    for font in fonts:
        font.close()
    return Font(path, index, version, codes)
