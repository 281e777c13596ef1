"""Builder of the glyph set: recognition of characters across typefaces, in InsightFace's layout.

As large and as open-set as face recognition, from real images that every Debian machine can generate: a class is a
Unicode character, its images are slightly distorted drawings in different typefaces. A folder holds
- train.rec, train.idx, train.lst, property: the training images, with the identity records of InsightFace;
- unseen.bin, unseen_font.bin, lookalike.bin: verification pairs (glyphs_pairs.py), each with a .tsv that describes its
  pairs;
- classes.txt: class, character and code point; manifest.json, written last: options, fonts, versions, counts.
"""

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import features

from partial_fc.data.pairs import write_pairs
from partial_fc.data.recordio import RecordWriter, pack
from partial_fc.flags.facts import In, check_numbers

from .glyphs_fonts import CHINESE, NEVER_TRAINED, TYPEFACES, Font, characters, choose, find_fonts
from .glyphs_pairs import FOLDS, SETS, choose_pairs, trained
from .glyphs_render import SHAPE_SIDE, Glyph, Pen, Runner, workers

MANIFEST = "manifest.json"
_FORMAT = 2  # version of the generator: sets of another number differ for the same options
_ALIGNED = 1.0  # second label of InsightFace's image records


@dataclass(frozen=True)
class GlyphOptions:
    """What to render. The same options, fonts and library versions give the same bytes, whatever `jobs`.
    Near ties between look-alikes are decided by the processor's float32 products."""

    out: Path
    """folder to make; it appears under this name only when complete"""
    num_classes: Annotated[int, In(1)] = 1500
    """characters to train on; those that stand in all eight Chinese typefaces come first"""
    images_per_typeface: Annotated[int, In(1)] = 2
    """distorted images of each character in each typeface"""
    image_size: Annotated[int, In("[16, 16384]")] = 40
    """width and height in pixels"""
    num_unseen: Annotated[int, In(2 * FOLDS)] = 2000
    """characters held out of training for the verification sets"""
    pairs: Annotated[int, In(2 * FOLDS)] = 6000
    """pairs in each verification set, in ten folds, half of them genuine"""
    quality: Annotated[int, In("[1, 100]")] = 90
    """JPEG quality, 1 to 100"""
    seed: int = 0
    """chooses the characters, the pairs and the distortions"""
    jobs: Annotated[int, In("[0, 4096]")] = 0
    """processes; 0: one for each core"""
    fonts: Path = Path("/usr/share/fonts")
    """folder below which the font files lie"""

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.pairs % (2 * FOLDS):
            raise ValueError(f"--pairs is {self.pairs}; expected a multiple of {2 * FOLDS}: {FOLDS} folds, two kinds")
        group = self.num_unseen // FOLDS
        # Two characters fewer than a fold has: some may lack unseen_font's typeface.
        if (group - 2) * (group - 3) // 2 < self.pairs // (2 * FOLDS):
            raise ValueError(
                f"--num-unseen {self.num_unseen} gives each fold {group} characters, too few for "
                f"{self.pairs // (2 * FOLDS)} different pairs of them; raise num_unseen or lower pairs"
            )

    def meaning(self) -> dict[str, Any]:
        """Returns the options that the bytes depend on."""
        return {name: value for name, value in asdict(self).items() if name not in ("out", "jobs", "fonts")}


def build(options: GlyphOptions) -> None:
    """Creates options.out, or reports that it exists. Raises ValueError if it holds something else."""
    if _is_complete(options):
        print(f"{options.out}: the glyph set is there already, with these options")
        return
    # The Chinese typefaces have characters for most sets, and the others are two packages more.
    fonts = find_fonts(options.fonts, [TYPEFACES[i] for i in CHINESE])
    typefaces = characters(fonts)
    if options.num_classes + options.num_unseen > sum(len(indices) == len(CHINESE) for indices in typefaces.values()):
        fonts = find_fonts(options.fonts)
        typefaces = characters(fonts)
    classes, unseen = choose(typefaces, options.num_classes, options.num_unseen, options.seed)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    # Built in a temporary folder and renamed at the end: an incomplete set is never visible.
    folder = Path(tempfile.mkdtemp(prefix=f".{options.out.name}-", dir=options.out.parent))
    try:
        pen = Pen(tuple((font.path, font.index) for font in fonts), options.image_size, options.quality, options.seed)
        with workers(options.jobs) as run:
            class_typefaces = drawn_by(pen, run, {code: trained(typefaces[code]) for code in classes})
            unseen_typefaces = drawn_by(pen, run, {code: CHINESE for code in unseen})
            images = write_training(folder, pen, run, class_typefaces, options.images_per_typeface)
            _write_tests(folder, pen, run, unseen_typefaces, options)
        counts = {
            "classes": len(classes),
            "images": images,
            "unseen": len(unseen),
            "in_5_typefaces": len(typefaces),
            "in_all_chinese_typefaces": sum(set(CHINESE) <= set(indices) for indices in typefaces.values()),
        }
        _write_manifest(folder, options, fonts, counts, unseen)
        folder.chmod(0o755)  # mkdtemp makes private folders
        folder.rename(options.out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{options.out}: {images} images of {len(classes)} characters, {len(SETS)} x {options.pairs} pairs")


def _is_complete(options: GlyphOptions) -> bool:
    out = options.out
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if not (out / MANIFEST).is_file():
        raise ValueError(f"{out} is there and is no glyph set (it has no {MANIFEST}); name another folder")
    manifest = json.loads((out / MANIFEST).read_text())
    want = {"format": _FORMAT, **options.meaning()}
    have = {"format": manifest["format"], **manifest["options"]}
    different = [f"{name} {have.get(name)} (asked for: {want[name]})" for name in want if have.get(name) != want[name]]
    if different:
        raise ValueError(
            f"{out} holds a glyph set of other options: {', '.join(different)}; name another folder, or delete this one"
        )
    for name, size in manifest["bytes"].items():
        got = (out / name).stat().st_size if (out / name).exists() else None
        if got != size:
            raise ValueError(f"{out / name}: got {got} bytes, expected {size}; delete {out} and build it anew")
    return True


def drawn_by(pen: Pen, run: Runner, typefaces: Mapping[int, Iterable[int]]) -> dict[int, tuple[int, ...]]:
    """Returns the typefaces that really draw each character: with ink, and not identical to another character.

    Font tables list more than exists: AR PL UKai has empty outlines, and several typefaces draw two characters with one
    outline, some by mistake (Micro Hei: U+4E7E as U+4E81). Such images would be wrong labels.
    """
    glyphs = [Glyph(code, typeface) for code, indices in typefaces.items() for typeface in indices]
    digests = list(run(pen.digest, glyphs, "checking outlines"))
    drawn_alike = Counter((glyph.typeface, digest) for glyph, digest in zip(glyphs, digests, strict=True))
    drawn: dict[int, list[int]] = {code: [] for code in typefaces}
    for glyph, digest in zip(glyphs, digests, strict=True):
        if digest and drawn_alike[glyph.typeface, digest] == 1:
            drawn[glyph.code].append(glyph.typeface)
    for code, indices in drawn.items():
        if not indices:
            raise ValueError(f"{chr(code)} (U+{code:04X}): no typeface draws it unlike all others; use another seed")
    return {code: tuple(indices) for code, indices in drawn.items()}


def write_training(
    folder: Path, pen: Pen, run: Runner, typefaces: Mapping[int, tuple[int, ...]], images_per_typeface: int
) -> int:
    """Writes train.rec, train.idx, train.lst, property, classes.txt; returns the number of images.

    Class c is the c-th character. Key 0 holds [first, end) of the identity records, keys 1, 2, ... the images by class,
    then comes one record a class with [first, end) of its images.
    """
    glyphs = [
        Glyph(code, typeface, 0, number)
        for code, indices in typefaces.items()
        for typeface in indices
        for number in range(images_per_typeface)
    ]
    first_class_key = 1 + len(glyphs)
    last = first_class_key + len(typefaces)
    if last > 2**24:
        raise ValueError(f"{last} records: InsightFace keeps their keys as float32, exact up to {2**24}; ask for fewer")
    label_of = {code: label for label, code in enumerate(typefaces)}
    with RecordWriter(folder / "train.rec") as records, open(folder / "train.lst", "w", encoding="utf-8") as lines:
        records.write(0, pack((first_class_key, last), b""))
        jpegs = run(pen.jpeg, glyphs, "training images")
        for key, (glyph, jpeg) in enumerate(zip(glyphs, jpegs, strict=True), start=1):
            label = label_of[glyph.code]
            records.write(key, pack((label, _ALIGNED), jpeg, id=key))
            # face2rec's list format: aligned, path, label. The path describes the image.
            name = f"{glyph.code:04x}/{TYPEFACES[glyph.typeface].name}-{glyph.number}.jpg"
            lines.write(f"{_ALIGNED:.0f}\t{name}\t{label}\n")
        begin = 1
        for label, indices in enumerate(typefaces.values()):
            end = begin + len(indices) * images_per_typeface
            records.write(first_class_key + label, pack((begin, end), b"", id=first_class_key + label))
            begin = end
    (folder / "property").write_text(f"{len(typefaces)},{pen.size},{pen.size}\n")
    table = "".join(f"{label}\t{chr(code)}\tU+{code:04X}\n" for code, label in label_of.items())
    (folder / "classes.txt").write_text(table, encoding="utf-8")
    return len(glyphs)


def shapes(pen: Pen, run: Runner, typefaces: Mapping[int, tuple[int, ...]]) -> NDArray[np.float32]:
    """Returns the shapes of N characters in the T trained typefaces, (N, T, P), as `choose_pairs` takes them."""
    faces = trained(CHINESE)
    wanted = [Glyph(code, face) for code, indices in typefaces.items() for face in faces if face in indices]
    shape_NTP = np.zeros((len(typefaces), len(faces), SHAPE_SIDE**2), np.float32)
    row_of = {code: row for row, code in enumerate(typefaces)}
    for glyph, shape in zip(wanted, run(pen.shape, wanted, "comparing characters"), strict=True):
        shape_NTP[row_of[glyph.code], faces.index(glyph.typeface)] = shape
    return shape_NTP


def _write_tests(
    folder: Path, pen: Pen, run: Runner, typefaces: Mapping[int, tuple[int, ...]], options: GlyphOptions
) -> None:
    """Writes NAME.bin and NAME.tsv of each verification set."""
    shape_NTP = shapes(pen, run, typefaces)
    pairs_of = {name: choose_pairs(name, typefaces, options.pairs, options.seed, shape_NTP) for name in SETS}
    glyphs_of = {name: [glyph for pair in pairs for glyph in pair[:2]] for name, pairs in pairs_of.items()}
    wanted = sorted(set().union(*glyphs_of.values()))
    jpeg = dict(zip(wanted, run(pen.jpeg, wanted, "test images"), strict=True))
    for name, pairs in pairs_of.items():
        write_pairs(folder / f"{name}.bin", [jpeg[glyph] for glyph in glyphs_of[name]], [pair.same for pair in pairs])
        with open(folder / f"{name}.tsv", "w", encoding="utf-8") as lines:
            for first, second, same in pairs:
                shown = [f"{chr(glyph.code)}\t{TYPEFACES[glyph.typeface].name}" for glyph in (first, second)]
                lines.write("\t".join((*shown, "same" if same else "different")) + "\n")


def _write_manifest(
    folder: Path, options: GlyphOptions, fonts: list[Font], counts: dict[str, int], unseen: list[int]
) -> None:
    manifest = {
        "format": _FORMAT,
        "options": options.meaning(),
        "counts": counts,
        "never_trained_typeface": TYPEFACES[NEVER_TRAINED].name,
        "typefaces": [
            {"name": typeface.name, "package": typeface.package, "file": font.path.name, "version": font.version}
            for typeface, font in zip(TYPEFACES, fonts, strict=False)
        ],
        "libraries": {
            "pillow": version("pillow"),
            "freetype": features.version("freetype2"),
            "opencv": cv2.__version__,
            "numpy": np.__version__,
        },
        "unseen": "".join(map(chr, unseen)),
        "bytes": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
    }
    text = json.dumps(manifest, indent=1, ensure_ascii=False)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
