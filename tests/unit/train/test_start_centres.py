"""--start-centres: imprinted ones, and those of files, on any number of ranks."""

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from partial_fc import models
from partial_fc.data import BadRecord, Sample, Source
from partial_fc.flags import HeadFlags
from partial_fc.foreign import ndarray_file
from partial_fc.head import CosFace, PartialFC
from partial_fc.models.inputs import FACE
from partial_fc.train.backbone import TorchBackbone
from partial_fc.train.begin import imprint, start_centres
from partial_fc.train.precision import Precision
from recipes.face.main import Config
from tests.flat import flat_head
from tests.unit.thread_world import ThreadWorld, in_world
from tests.unit.train.test_face_start import config_of, run_of

C, D, SIZE = 8, 6, 16
BAD, FEW = 4, 3  # the image that cannot be read; images of a class


class Pictures(Source):
    """Noise, in no order of class. Class 6 has no image, and class 3 none that can be read."""

    num_classes = C
    label_N = np.array([5, 0, 1, 7, 3, 0, 2, 5, 5, 4, 5, 0, 7, 1, 5, 0, 0])

    def __len__(self) -> int:
        return len(self.label_N)

    def read(self, index: int) -> Sample:
        if index == BAD:
            raise BadRecord("no image")
        pixels = np.random.default_rng(index).integers(0, 256, (SIZE, SIZE, 3), np.uint8)
        return Sample(pixels, int(self.label_N[index]), index)

    def labels(self) -> np.ndarray:
        return self.label_N


def module() -> torch.nn.Module:
    torch.manual_seed(3)
    net = models.build("tiny", D, SIZE)
    for buffer in net.buffers():  # running statistics that matter
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)
    return net


def started(
    world: ThreadWorld,
    config: Config,
    network: torch.nn.Module,
    given: str,
    source: Source,
    change: Callable = lambda net, rank: None,
    **head,
) -> PartialFC:
    """The head of one rank."""
    net = copy.deepcopy(network)
    change(net, world.rank)
    facts = {"network": "tiny", "embedding_size": str(D), "image_size": str(SIZE), "flip": "true"}
    precision = Precision("fp32", torch.device("cpu"))
    backbone = TorchBackbone(net, world, precision, lambda _: torch.optim.SGD(net.parameters()), FACE, facts)
    run = run_of(world, config)
    flags = HeadFlags(start_centres=given)
    made = flat_head(C, D, CosFace(), world=world, **head)
    start_centres.load(run, [(flags, made)], backbone, made, source)
    assert net.training
    return made


def centres(size: int, root: Path, *args, **head) -> torch.Tensor:
    """Those of all ranks, (C, D) or (C, K, D)."""
    config, network = config_of(root), module()  # not in threads: parser and generator are the process's
    heads = in_world(size, lambda world: started(world, config, network, *args, **head))
    assert not any(head.row_state()["touched"].any() for head in heads)
    return torch.cat([head.centres for head in heads])


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(imprint, "_BATCH", 2)
    monkeypatch.setattr(imprint, "NUM_IMAGES", FEW)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def apart(subs: torch.Tensor, centre: torch.Tensor) -> None:
    """The first sub-centre is the centre, each other one is near it, and no two are equal: (..., subs, D), (..., D)."""
    first, others = subs[..., :1, :], subs[..., 1:, :]
    assert torch.equal(first.squeeze(-2), centre)
    if others.numel():
        turned = 1 - torch.cosine_similarity(first, others, dim=-1)
        assert turned.min() > 0
        assert turned.max() < 1e-3


def test_imprinted_centres_are_mean_directions_on_any_number_of_ranks(tmp_path, caplog):
    caplog.set_level("INFO")
    one = centres(1, tmp_path, "imprint", Pictures())
    for size in (2, 3, 5):
        assert torch.equal(centres(size, tmp_path, "imprint", Pictures()), one)
    both = centres(2, tmp_path, "imprint", Pictures(), sub_centres=2)
    random = PartialFC(C, D, CosFace()).centres
    net, source = module().double().eval(), Pictures()
    for label in range(C):
        chosen = [i for i in np.flatnonzero(source.label_N == label)[:FEW].tolist() if i != BAD]
        if not chosen:
            assert torch.equal(one[label], random[label])
            continue
        units = []
        for image in chosen:
            pixels = torch.from_numpy(source.read(image).image).permute(2, 0, 1)[None]
            views = torch.cat((pixels, pixels.flip(3)))
            with torch.no_grad():
                units.append(normalize(net(FACE(views).double()).sum(0), dim=0))
        mean = normalize(torch.stack(units).mean(0), dim=0)
        torch.testing.assert_close(one[label].double(), mean, atol=1e-6, rtol=0)
        apart(both[label], one[label])
    assert "centres of 6 classes are means of 12 images" in caplog.text
    assert "1 image could not be read" in caplog.text
    assert "2 classes without images" in caplog.text


def test_a_network_that_has_diverged_is_told_with_the_class(tmp_path):
    def diverge(net: torch.nn.Module, rank: int) -> None:
        net.get_parameter("fc.bias").data.fill_(torch.nan)

    for size in (1, 3):
        with pytest.raises(ValueError, match=r"imprint: class 0: the mean embedding of its 3 image"):
            centres(size, tmp_path, "imprint", Pictures(), diverge)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(("dtype", "subs"), [("float32", 1), ("float16", 1), (">f8", 2)])
def test_centres_of_a_matrix(tmp_path, size, dtype, subs):
    given = np.random.default_rng(1).normal(size=(C, subs, D)).astype(dtype)
    np.save(tmp_path / "own.npy", given.squeeze(1) if subs == 1 else given)
    np.save(tmp_path / "same.npy", given[:, 0])
    found = centres(size, tmp_path, str(tmp_path / "own.npy"), Pictures(), sub_centres=subs)
    assert torch.equal(found.view(C, subs, D), torch.from_numpy(given.astype("f4")))
    found = centres(size, tmp_path, str(tmp_path / "same.npy"), Pictures(), sub_centres=subs)
    apart(found.view(C, subs, D), torch.from_numpy(given[:, 0].astype("f4")))


@pytest.mark.parametrize("size", [1, 3])
def test_centre_files_of_other_trainers(tmp_path, size):
    centre_CD = torch.randn(C, D, generator=torch.Generator().manual_seed(1))
    for folder in ("torch", "mxnet"):
        (tmp_path / folder).mkdir()
    for rank, part in enumerate(centre_CD.split(4)):
        torch.save(part.clone(), tmp_path / f"torch/softmax_fc_gpu_{rank}.pt")
        ndarray_file.write(tmp_path / f"mxnet/{rank}_centers.param", [part.clone()])
        ndarray_file.write(tmp_path / f"mxnet/{rank}_centers_mom.param", [part.clone()])
    torch.save(centre_CD, tmp_path / "rank_0_softmax_weight.pt")
    for name in ("torch", "mxnet", "rank_0_softmax_weight.pt"):
        assert torch.equal(centres(size, tmp_path, str(tmp_path / name), Pictures()), centre_CD)


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        (np.ones((C, D + 1)), r"own\.npy: it holds float64 \(8, 7\); expected floating \(8, 6\)"),
        (np.ones((C, D), int), r"it holds int64 \(8, 6\)"),
        (np.ones(C), r"it holds float64 \(8,\)"),
        (np.diag([1.0] * 5 + [0.0] * 3)[:, :D], "class 5 has NaN or Inf, or length 0"),
        (np.where(np.arange(C)[:, None] == 7, np.nan, np.ones((C, D))), "class 7 has NaN"),
        (None, r"own\.npy: not found; expected imprint, FILE\.npy"),
    ],
)
def test_files_that_do_not_fit_are_refused_on_all_ranks(tmp_path, rows, named):
    if rows is not None:
        np.save(tmp_path / "own.npy", rows)
    for size in (1, 3):
        with pytest.raises(ValueError, match=named):
            centres(size, tmp_path, str(tmp_path / "own.npy"), Pictures())


def test_other_widths_and_unknown_files_are_refused(tmp_path):
    torch.save(torch.ones(C, D + 1), tmp_path / "rank_0_softmax_weight.pt")
    with pytest.raises(ValueError, match=f"centres of {D + 1} features; expected {D}"):
        centres(2, tmp_path, str(tmp_path), Pictures())
    torch.save(torch.ones(C - 1, D), tmp_path / "rank_0_softmax_weight.pt")
    with pytest.raises(ValueError, match=f"{C - 1} classes; --num-classes says {C}"):
        centres(2, tmp_path, str(tmp_path), Pictures())
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match="none of a known kind"):
        centres(1, tmp_path, str(tmp_path / "notes.txt"), Pictures())
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no complete checkpoint"):
        centres(1, tmp_path, str(tmp_path / "empty"), Pictures())
