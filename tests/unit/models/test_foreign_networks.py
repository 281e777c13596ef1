"""Networks as they are published, at their own widths: AdaFace's checkpoint, and ONNX of iresnet and MobileFaceNet."""

import pytest
import torch

import partial_fc
from partial_fc import models
from recipes.face.backbone import ModelFlags, build
from tests.world.test_foreign import IR, SIZE, D, adaface, exported, lively


@pytest.mark.slow
def test_adaface_embeds_and_starts_a_training(tmp_path):
    theirs = lively(IR("adaface", False, (64, 128, 256, 512)))
    path = tmp_path / "adaface_ir18.ckpt"
    torch.save(adaface(theirs.state_dict()), path)
    model = partial_fc.load(path)
    image = torch.randint(0, 256, (2, 3, SIZE, SIZE), dtype=torch.uint8)
    value = (image.float() - 127.5) / 127.5
    with torch.no_grad():
        expected = theirs(value.flip(1))
    torch.testing.assert_close(model.forward(image), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    assert (model.name, model.image_size, model.embedding_size) == ("r18", SIZE, D)
    built = build(ModelFlags(network="r18", embedding_size=D, pretrained=path), SIZE, torch.device("cpu"))
    assert "BGR" in " ".join(built.notes)
    assert all(torch.equal(t, model.network.state_dict()[name]) for name, t in built.module.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [("r18", 32), ("mbf", 64)])
def test_onnx_of_torchs_older_exporter(tmp_path, name, size):
    runtime = pytest.importorskip("onnxruntime")
    path = tmp_path / f"w600k_{name}.onnx"
    exported(lively(models.build(name, D, size)), path, 11, size)
    model = partial_fc.load(path)
    image = torch.randint(0, 256, (1, 3, size, size), dtype=torch.uint8)
    given = ((image.float() - 127.5) / 127.5).numpy()
    expected = torch.from_numpy(runtime.InferenceSession(str(path)).run(None, {"input.1": given})[0])
    atol = 2e-5 * float(expected.abs().max())
    torch.testing.assert_close(model.forward(image), expected, rtol=0, atol=atol)
    assert (model.name, model.image_size, model.embedding_size) == (name, size, D)
