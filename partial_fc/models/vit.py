"""The vision transformers of arcface_torch: patches without a class token, all of them joined by one linear layer.

Parameter names and shapes are those of insightface's recognition/arcface_torch/backbones/vit.py, so that its weights,
LVFace's and TransFace's load without a mapping.

B images, L patches of an image, K of them kept, D width, H heads.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partial_fc.models.sample_random import Dropout, DropPath, SampleRandom

HEADS = 8


@dataclass(frozen=True)
class Size:
    """Width and number of blocks; drop_path: of the last block; mask: share of the patches left out in training."""

    width: int
    depth: int
    drop_path: float = 0.1
    mask: float = 0.1


# arcface_torch's names and sizes; vit_l beside its _dp005_mask_005 is TransFace's. arcface_torch masks 10 % of the
# patches under every name but "mask0" and "mask_0": the 0.05 of "mask_005" never reaches its masking. The published
# networks were trained so, and so are these.
SIZES = {
    "vit_t": Size(256, 12),
    "vit_t_dp005_mask0": Size(256, 12, 0.05, 0.0),
    "vit_s": Size(512, 12),
    "vit_s_dp005_mask_0": Size(512, 12, 0.05, 0.0),
    "vit_b": Size(512, 24),
    "vit_b_dp005_mask_005": Size(512, 24, 0.05),
    "vit_l": Size(768, 24),
    "vit_l_dp005_mask_005": Size(768, 24, 0.05),
    "vit_h": Size(1024, 48, 0.1, 0.0),
}


def patch_of(image_size: int) -> int:
    """Returns the side of a patch in pixels: 9 at 112 pixels, as published (the last 4 rows and columns are left out);
    else of 6 to 16 the nearest to 9 that divides the image. Raises ValueError if none does."""
    if image_size == 112:
        return 9
    sides = [side for side in range(6, 17) if image_size % side == 0 and image_size >= 2 * side]
    if not sides:
        raise ValueError(
            f"image size {image_size} does not divide into patches of 6 to 16 pixels; expected 112, or a multiple of "
            f"8 such as {max(16, round(image_size / 8) * 8)}"
        )
    return min(sides, key=lambda side: abs(side - 9))


class Attention(nn.Module):
    """Attention among the patches of an image, computed in fp32, also under autocast and beside 16-bit weights."""

    def __init__(self, width: int):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)

    def forward(self, x_BLD: Tensor) -> Tensor:
        qkv_BL3D = self.qkv(x_BLD)
        wide_BL3D = qkv_BL3D.to(torch.promote_types(qkv_BL3D.dtype, torch.float32))
        with torch.autocast(x_BLD.device.type, enabled=False):
            q, k, v = wide_BL3D.unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
            y_BHLd = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y_BHLd.transpose(1, 2).flatten(2).to(qkv_BL3D.dtype))


class Mlp(nn.Module):
    """Two linear layers with ReLU6 between."""

    def __init__(self, width: int):
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu6(self.fc1(x)))


class Block(nn.Module):
    """Attention and MLP, each on normalised input, added to it. drop_path: the share of samples without a branch."""

    def __init__(self, width: int, drop_path: float, stream: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width)
        self.drop1, self.drop2 = DropPath(drop_path, stream), DropPath(drop_path, stream + 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop1(self.attn(self.norm1(x)))
        return x + self.drop2(self.mlp(self.norm2(x)))


class PatchEmbed(nn.Module):
    """A linear layer of each patch: image_B3HW -> patch_BLD."""

    def __init__(self, side: int, in_channels: int, width: int):
        super().__init__()
        self.proj = nn.Conv2d(in_channels, width, side, stride=side)

    def forward(self, image_B3HW: Tensor) -> Tensor:
        return self.proj(image_B3HW).flatten(2).transpose(1, 2)


class PatchMask(SampleRandom):
    """Chooses the patches of each image that training keeps."""

    def __init__(self, share: float, stream: int):
        super().__init__(stream)
        self.share = share

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Returns their numbers: int64 (B, K), in random order."""
        num_kept = int(x_BLD.shape[1] * (1 - self.share))
        return self.uniform(x_BLD, x_BLD.shape[1]).argsort(dim=1, stable=True)[:, :num_kept]


class VisionTransformer(nn.Module):
    """Normalised image_B3HW (float) -> feat_BD (fp32), not L2-normalised: the head does that.

    Masked patches skip the blocks; mask_token stands for them after the last norm. dropout: before `feature`.
    """

    # The last products and their statistics stay fp32, as those of IResNet.
    KEEPS_FP32 = ("norm", "feature")

    def __init__(self, size: Size, embedding_size: int, image_size: int, in_channels: int = 3, dropout: float = 0.0):
        super().__init__()
        width, depth, side = size.width, size.depth, patch_of(image_size)
        num_patches = (image_size // side) ** 2
        self.patch_embed = PatchEmbed(side, in_channels, width)
        self.pos_embed = nn.Parameter(torch.zeros(1, num_patches, width))
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        self.dropout, self.mask = Dropout(dropout, 0), PatchMask(size.mask, 1)
        rates = [size.drop_path * number / max(1, depth - 1) for number in range(depth)]
        self.blocks = nn.ModuleList(Block(width, rate, 2 + 2 * number) for number, rate in enumerate(rates))
        self.norm = nn.LayerNorm(width)
        self.feature = nn.Sequential(
            nn.Linear(width * num_patches, width, bias=False),
            nn.BatchNorm1d(width, eps=2e-5),
            nn.Linear(width, embedding_size, bias=False),
            nn.BatchNorm1d(embedding_size, eps=2e-5),
        )
        nn.init.normal_(self.mask_token, std=0.02)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def no_weight_decay(self) -> set[str]:
        """Returns the names of embeddings that no weight decay shrinks (timm's convention)."""
        return {"pos_embed", "mask_token"}

    def forward(self, image_B3HW: Tensor) -> Tensor:
        x_BLD = self.patch_embed(image_B3HW) + self.pos_embed
        masking = self.training and self.mask.share > 0
        if masking:
            kept_BKD = self.mask(x_BLD)[:, :, None].expand(-1, -1, x_BLD.shape[2])
            x_BLD = x_BLD.gather(1, kept_BKD)
        for block in self.blocks:
            x_BLD = block(x_BLD)
        with torch.autocast(x_BLD.device.type, enabled=False):
            x_BLD = self.norm(x_BLD.to(self.norm.weight.dtype))
            if masking:
                token_BLD = self.mask_token.to(x_BLD.dtype).expand(len(x_BLD), self.pos_embed.shape[1], -1)
                x_BLD = token_BLD.scatter(1, kept_BKD, x_BLD)
            return self.feature(self.dropout(x_BLD.flatten(1)))
