"""Networks as they are published, at their own widths: ONNX of iresnet and MobileFaceNet."""

import pytest
import torch

import partial_fc
from partial_fc import models
from tests.world.test_foreign import D, exported, lively


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
