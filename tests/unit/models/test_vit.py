"""The vision transformers of arcface_torch: layout, arithmetic, masking, and files of weights."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import partial_fc
from partial_fc import models
from partial_fc.models import vit
from partial_fc.models.sample_random import Dropout, DropPath, SampleRandom
from tests.unit.models.test_models import with_half_weights

SIZE, WIDTH, SIDE = 32, 16, 8
SMALL = vit.Size(64, 3)


def perturbed(model: torch.nn.Module) -> torch.nn.Module:
    """With other weights and statistics than fresh ones."""
    for name, t in model.state_dict().items():
        if t.is_floating_point():
            t.copy_(t + (0.5 + torch.rand_like(t) if name.endswith("running_var") else 0.1 * torch.randn_like(t)))
    return model.eval()


def by_hand(weights: dict[str, Tensor], image: Tensor, side: int) -> Tensor:
    """Evaluates the published layout from its state dict alone."""
    w = {name: t.double().numpy() for name, t in weights.items()}
    across = image.shape[-1] // side
    x = image.double().numpy()[:, :, : across * side, : across * side]
    patch = x.reshape(len(x), 3, across, side, across, side)
    x = np.einsum("bciyjx,dcyx->bijd", patch, w["patch_embed.proj.weight"]).reshape(len(x), across * across, -1)
    x = x + w["patch_embed.proj.bias"] + w["pos_embed"]

    def norm(at: str, x: np.ndarray) -> np.ndarray:
        mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) / np.sqrt(var + 1e-5) * w[f"{at}.weight"] + w[f"{at}.bias"]

    def linear(at: str, x: np.ndarray) -> np.ndarray:
        return np.einsum("...i,oi->...o", x, w[f"{at}.weight"]) + w.get(f"{at}.bias", 0.0)

    number = 0
    while f"blocks.{number}.norm1.weight" in w:
        at = f"blocks.{number}"
        qkv = linear(f"{at}.attn.qkv", norm(f"{at}.norm1", x))
        q, k, v = np.moveaxis(qkv.reshape(*qkv.shape[:2], 3, 8, -1), 2, 0)  # batch, patch, head, channel
        score = np.exp(np.einsum("bqhc,bkhc->bhqk", q, k) / math.sqrt(q.shape[-1]))
        y = np.einsum("bhqk,bkhc->bqhc", score / score.sum(-1, keepdims=True), v).reshape(x.shape)
        x = x + linear(f"{at}.attn.proj", y)
        x = x + linear(f"{at}.mlp.fc2", linear(f"{at}.mlp.fc1", norm(f"{at}.norm2", x)).clip(0, 6))
        number += 1
    x = norm("norm", x).reshape(len(x), -1)
    for layer in (0, 2):
        x, batch_norm = linear(f"feature.{layer}", x), f"feature.{layer + 1}"
        scale = w[f"{batch_norm}.weight"] / np.sqrt(w[f"{batch_norm}.running_var"] + 2e-5)
        x = (x - w[f"{batch_norm}.running_mean"]) * scale + w[f"{batch_norm}.bias"]
    return torch.from_numpy(x)


@pytest.mark.parametrize(("image_size", "side"), [(112, 9), (40, 8), (28, 7)])
def test_the_output_is_that_of_the_published_layout(image_size, side):
    torch.manual_seed(0)
    model = perturbed(vit.VisionTransformer(SMALL, WIDTH, image_size))
    image = torch.randn(3, 3, image_size, image_size)
    expected = by_hand(model.state_dict(), image, side)
    assert (model(image) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_the_face_recipe_has_every_network():
    from recipes.face.backbone import NETWORKS

    assert NETWORKS == models.NAMES


@pytest.mark.parametrize("image_size", [37, 113])
def test_an_image_that_no_patch_divides_is_refused(image_size):
    with pytest.raises(ValueError, match=f"image size {image_size} .* multiple of 8 such as"):
        models.build("vit_t", 8, image_size)


def test_masked_patches_reach_the_output_as_the_token_alone():
    torch.manual_seed(0)
    model = vit.VisionTransformer(vit.Size(64, 1, 0.0, 0.5), WIDTH, SIZE)
    seen, kept = [], []
    model.blocks[0].register_forward_hook(lambda _m, x, _y: seen.append(x[0].shape))
    model.mask.register_forward_hook(lambda _m, _x, y: kept.append(y))
    model.feature.register_forward_hook(lambda _m, x, _y: seen.append(x[0]))
    model(torch.randn(4, 3, SIZE, SIZE)).sum().backward()
    assert seen[0] == (4, 8, 64)
    masked_BL = (seen[1].view(4, 16, 64) == model.mask_token).all(2)
    assert masked_BL.sum(1).tolist() == [8] * 4
    assert not masked_BL.gather(1, kept[0]).any()
    assert model.mask_token.grad.abs().sum() > 0
    seen.clear()
    model.eval()(torch.randn(4, 3, SIZE, SIZE))
    assert seen[0] == (4, 16, 64)


def test_random_numbers_belong_to_samples():
    """Any split of a batch draws the same; without names torch's generator draws."""
    torch.manual_seed(0)
    model = vit.VisionTransformer(vit.Size(64, 4, 0.5), WIDTH, SIZE, dropout=0.3)
    layers, image, position = SampleRandom.of(model), torch.randn(6, 3, SIZE, SIZE), torch.arange(6) + (1 << 33)
    assert len({layer.stream for layer in layers}) == len(layers) == 2 + 2 * 4
    model.feature = torch.nn.Identity()

    def run(part: slice, seed: int = 5) -> Tensor:
        SampleRandom.name_samples(layers, seed, position[part])
        return model(image[part])

    whole = run(slice(0, 6))
    torch.testing.assert_close(torch.cat([run(slice(0, 4)), run(slice(4, 6))]), whole)
    assert torch.equal(run(slice(0, 6)), whole)
    assert not torch.allclose(run(slice(0, 6), seed=6), whole)


def test_a_random_layer_keeps_the_mean():
    for layer in (Dropout(0.3), DropPath(0.3, 1)):
        SampleRandom.name_samples([layer], 0, torch.arange(20_000))
        y = layer(torch.ones(20_000, 2))
        assert sorted(set(y.flatten().tolist())) == pytest.approx([0, 1 / 0.7])
        assert y.mean().item() == pytest.approx(1, abs=0.03)
        assert torch.equal(layer.eval()(y), y)
    assert bool((DropPath(0.5, 1)(torch.ones(50, 2)).std(1) == 0).all())


@pytest.mark.parametrize("image_size", [32, 112])
def test_a_file_without_facts_is_recognised(tmp_path, image_size):
    torch.manual_seed(0)
    model = perturbed(models.build("vit_t", 24, image_size))
    torch.save({f"module.{name}": t for name, t in model.state_dict().items()}, tmp_path / "model.pt")
    found = partial_fc.load(tmp_path / "model.pt")
    assert (found.name, found.embedding_size, found.image_size) == ("vit_t", 24, image_size)
    image = torch.randint(0, 256, (2, 3, image_size, image_size), dtype=torch.uint8)
    # The pixels are scaled in another order, and the rounding grows through twelve blocks.
    torch.testing.assert_close(found.forward(image), model((image - 127.5) / 127.5), rtol=1e-3, atol=2e-4)


def test_a_size_that_is_not_known_is_refused_by_its_numbers(tmp_path):
    torch.save(vit.VisionTransformer(SMALL, WIDTH, SIZE).state_dict(), tmp_path / "model.pt")
    with pytest.raises(ValueError, match="width 64 with 3 blocks; expected vit_t 256 x 12"):
        partial_fc.load(tmp_path / "model.pt")


def test_16_bit_weights_and_autocast_give_fp32_features():
    torch.manual_seed(0)
    model, image = vit.VisionTransformer(SMALL, WIDTH, SIZE), torch.randn(4, 3, SIZE, SIZE)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(image).dtype == torch.float32
    model = with_half_weights(model, torch.bfloat16)
    features = model(image.bfloat16())
    assert features.dtype == torch.float32
    features.sum().backward()
