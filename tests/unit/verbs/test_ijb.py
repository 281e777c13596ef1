"""IJB's layout in small, against an independent computation."""

from itertools import combinations

import cv2
import numpy as np
import pytest
import torch

from partial_fc import models
from partial_fc.embedding.load import load
from partial_fc.verbs.model.evaluate import EvaluateOptions, evaluate
from partial_fc.verbs.model.ijb import Ijb
from tests.unit.models.test_encoders import delivered
from tests.unit.verbs.test_evaluate_command import ALONE, read_report

POINTS = np.array([[38.2946, 51.6963], [73.5318, 51.5014], [56.0252, 71.7366], [41.5493, 92.3655], [70.7299, 92.2041]])
SIZE = 56


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    torch.manual_seed(4)
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    delivered(path, models.build("tiny", 16, SIZE), "tiny", size=SIZE)
    return path


@pytest.fixture(scope="module")
def ijb_folder(tmp_path_factory):
    """12 subjects; two templates of each, of several media; half of the subjects in each gallery."""
    rng = np.random.default_rng(3)
    folder = tmp_path_factory.mktemp("IJBC")
    (folder / "loose_crop").mkdir()
    (folder / "meta").mkdir()
    faces = rng.integers(0, 256, (12, 8, 8, 3)).astype(np.uint8)
    points_lines, tid_lines, gallery, probe, number = [], [], {"G1": [], "G2": []}, [], 0
    for subject in range(12):
        for template in (100 + subject, 300 + subject):
            for media in rng.integers(0, 3, rng.integers(1, 6)):
                number += 1
                face = cv2.resize(faces[subject], (112, 112)) + rng.normal(0, 60, (112, 112, 3))
                turn = cv2.getRotationMatrix2D((56, 56), float(rng.uniform(-30, 30)), 1.3)
                turn[:, 2] += 15
                image = cv2.warpAffine(face.clip(0, 255).astype(np.uint8), turn, (150, 140))
                cv2.imwrite(str(folder / "loose_crop" / f"{number}.png"), image)
                points = POINTS @ turn[:, :2].T + turn[:, 2]
                score = rng.uniform(0.5, 1)
                points_lines.append(f"{number}.png " + " ".join(f"{x:.3f}" for x in points.ravel()) + f" {score:.3f}")
                tid_lines.append(f"{number}.png {template} {template * 10 + media}")
                row = f"{template},{subject},img/{number}.png,1"
                (gallery["G1" if subject < 6 else "G2"] if template < 300 else probe).append(row)
    ids = [*range(100, 112), *range(300, 312)]
    pairs = [f"{a} {b} {int(a % 100 == b % 100)}" for a, b in combinations(ids, 2)]
    meta = folder / "meta"
    for name, lines in [
        ("ijbc_name_5pts_score.txt", points_lines),
        ("ijbc_face_tid_mid.txt", tid_lines),
        ("ijbc_template_pair_label.txt", pairs),
        ("ijbc_1N_gallery_G1.csv", ["TEMPLATE_ID,SUBJECT_ID,FILENAME,X", *gallery["G1"]]),
        ("ijbc_1N_gallery_G2.csv", ["TEMPLATE_ID,SUBJECT_ID,FILENAME,X", *gallery["G2"]]),
        ("ijbc_1N_probe_mixed.csv", ["TEMPLATE_ID,SUBJECT_ID,FILENAME,X", *probe]),
    ]:
        (meta / name).write_text("\n".join(lines) + "\n")
    return folder


def umeyama(points):
    """Umeyama (1991): the similarity that moves the points to POINTS, scaled to SIZE."""
    wanted = POINTS * SIZE / 112
    a, b = points - points.mean(0), wanted - wanted.mean(0)
    u, d, vt = np.linalg.svd(b.T @ a)
    sign = np.diag([1, np.sign(np.linalg.det(u @ vt))])
    rotation = u @ sign @ vt
    scale = (d * sign.diagonal()).sum() / (a**2).sum()
    return np.concatenate((scale * rotation, (wanted.mean(0) - scale * rotation @ points.mean(0))[:, None]), 1)


def template_features(folder, model):
    """By template number; image after image."""
    lines = (folder / "meta" / "ijbc_name_5pts_score.txt").read_text().split("\n")[:-1]
    tids = (folder / "meta" / "ijbc_face_tid_mid.txt").read_text().split("\n")[:-1]
    media: dict[int, dict[int, list[np.ndarray]]] = {}
    for line, tid in zip(lines, tids, strict=True):
        name, *numbers = line.split()
        image = cv2.imread(str(folder / "loose_crop" / name))[:, :, ::-1]
        image = cv2.warpAffine(image, umeyama(np.array(numbers[:10], float).reshape(5, 2)), (SIZE, SIZE))
        pixels = torch.from_numpy(image.copy()).permute(2, 0, 1)[None]
        feat = sum(model.forward(view)[0].double().numpy() for view in (pixels, pixels.flip(3)))
        feat = feat * float(numbers[10])
        _, template, medium = tid.split()
        media.setdefault(int(template), {}).setdefault(int(medium), []).append(feat)
    pooled = {t: sum(np.mean(feats, axis=0) for feats in of.values()) for t, of in media.items()}
    return {template: feat / np.linalg.norm(feat) for template, feat in pooled.items()}


def test_equals_an_independent_computation(ijb_folder, model_file, tmp_path):
    evaluate(EvaluateOptions(model=model_file, ijb=ijb_folder, out=tmp_path, batch_size=7), *ALONE)
    report = read_report(tmp_path)["sets"]["IJBC"]
    values = report["values"]
    feats = template_features(ijb_folder, load(model_file))
    cosines = {(a, b): float(feats[a] @ feats[b]) for a, b in combinations(sorted(feats), 2)}
    impostors = sorted((c for (a, b), c in cosines.items() if a % 100 != b % 100), reverse=True)
    genuine = np.array([c for (a, b), c in cosines.items() if a % 100 == b % 100])
    for far in ("1e-1", "1e-2"):
        threshold = impostors[int(float(far) * len(impostors))]
        assert values[f"tar@far={far}"] == np.mean(genuine > threshold)
        # Half-way to the least similar pair that is accepted: the cosines themselves are equal.
        accepted = min(c for c in cosines.values() if c > threshold)
        given = report["threshold_at_far"][far]["cosine"]
        assert given == pytest.approx((threshold + accepted) / 2, abs=1e-6)
    assert 0.3 < values["tar@far=1e-1"] <= 1
    assert values["tar@far=1e-6"] is None  # so few pairs cannot tell
    right = 0
    for name, subjects in (("G1", range(6)), ("G2", range(6, 12))):
        ranks, strangers = [], []
        for probe in range(12):
            order = sorted(subjects, key=lambda s: -float(feats[300 + probe] @ feats[100 + s]))
            if probe in subjects:
                ranks.append(1 + order.index(probe))
            else:
                strangers.append(probe)
        assert values[f"{name}/rank1"] == np.mean(np.array(ranks) == 1)
        assert values[f"{name}/rank5"] == np.mean(np.array(ranks) <= 5)
        right += sum(rank == 1 for rank in ranks)
    assert values["both/rank1"] == right / 12
    assert values["both/tpir@fpir=1e-1"] is None  # 6 strangers


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("name_5pts_score", lambda s: s.replace(" 0.", " x.", 1), r"line 1: expected an image, ten coordinates"),
        ("face_tid_mid", lambda s: s.partition("\n")[2], r"has \d+ lines; expected one for each of the"),
        ("face_tid_mid", lambda s: s.replace("2.png", "7.png", 1), r"line 2: image 7\.png, where .* has 2\.png"),
        ("template_pair_label", lambda s: s.replace("100 101 0", "100 999 0"), "template 999 has no image"),
    ],
)
def test_a_bad_line_is_named(ijb_folder, tmp_path, file, change, words):
    (tmp_path / "meta").mkdir()
    for path in (ijb_folder / "meta").iterdir():
        text = path.read_text()
        (tmp_path / "meta" / path.name).write_text(change(text) if file in path.name else text)
    with pytest.raises(ValueError, match=words):
        Ijb(tmp_path, "IJBC", SIZE)
