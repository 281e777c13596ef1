"""Centre files of InsightFace's trainers, as those programs write them."""

import copy
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from partial_fc import checkpoint, models
from partial_fc.foreign import ndarray_file
from partial_fc.head import CosFace
from partial_fc.head.rows import RowAdamW, RowSGD
from partial_fc.head.shard import Shard
from partial_fc.optim.backbone import build, load_named_state, set_lr
from partial_fc.verbs.checkpoint.import_centres import ImportOptions, import_centres
from partial_fc.verbs.checkpoint.verify import VerifyOptions, verify
from tests.flat import flat_head
from tests.unit.stored_checkpoints import D, OneOf, whole

C = 11


def values(seed: int, rows: int = C, width: int = D) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def loaded(folder: Path, size: int, **options) -> dict[str, torch.Tensor]:
    """All rows, as so many ranks load them."""
    assert verify(VerifyOptions((folder,))) == 0
    heads = [flat_head(C, D, CosFace(), world=OneOf(rank, size), **options) for rank in range(size)]
    for head in heads:
        assert checkpoint.Checkpoint(folder).load_head(head) == []
    return whole(heads)


# ---- MXNet


def as_file(*arrays: np.ndarray, names=(), magic=0xF993FAC9, numbers=None) -> bytes:
    """The layout, written down once more."""
    codes = {"f4": 0, "f8": 1, "f2": 2, "u1": 3, "i4": 4, "i1": 5, "i8": 6}
    content = struct.pack("<QQQ", 0x112, 0, len(arrays))
    for array in arrays:
        content += struct.pack(f"<Iii{array.ndim}q", magic, 0, array.ndim, *(numbers or array.shape))
        content += struct.pack("<iii", 1, 0, codes[array.dtype.str[1:]]) + array.tobytes()
    content += struct.pack("<Q", len(names))
    return content + b"".join(struct.pack("<Q", len(name)) + name.encode() for name in names)


def mx_files(folder: Path, size: int, momentum: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """As MemoryBank.save of so many ranks; returns all rows. Padding is what training left there."""
    folder.mkdir(exist_ok=True)
    each = -(-C // size)
    centre_CD, mom_CD = values(1, each * size), values(2, each * size)
    for rank in range(size):
        part = slice(rank * each, (rank + 1) * each)
        (folder / f"{rank}_centers.param").write_bytes(as_file(centre_CD[part].numpy()))
        if momentum:
            (folder / f"{rank}_centers_mom.param").write_bytes(as_file(mom_CD[part].numpy()))
    return centre_CD[:C], mom_CD[:C]


@pytest.mark.mxnet
def test_the_reader_reads_what_mxnet_writes_and_writes_the_same(mx, tmp_path):
    arrays = {
        "arg:a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "aux:b": np.arange(5, dtype=np.float64),
        "c": np.arange(4, dtype=np.float16).reshape(1, 2, 2),
        "d": np.arange(3, dtype=np.uint8),
        "e": np.arange(3, dtype=np.int32),
        "f": np.arange(3, dtype=np.int64),
    }
    as_mx = {name: mx.nd.array(a, dtype=a.dtype) for name, a in arrays.items()}
    mx.nd.save(str(tmp_path / "named"), as_mx)
    mx.nd.save(str(tmp_path / "listed"), list(as_mx.values()))
    mx.nd.save(str(tmp_path / "one"), as_mx["arg:a"])
    with mx.util.np_shape(True), mx.util.np_array(True):
        mx.npx.save(str(tmp_path / "np"), {"x": mx.np.ones((2, 2))})
    named, listed = ndarray_file.read(tmp_path / "named"), ndarray_file.read(tmp_path / "listed")
    assert list(named) == list(arrays)
    assert list(listed) == list("012345")
    for name, again in zip(named, listed.values(), strict=True):
        assert named[name].numpy().dtype == arrays[name].dtype
        assert np.array_equal(named[name], arrays[name])
        assert np.array_equal(again, arrays[name])
    assert np.array_equal(ndarray_file.read(tmp_path / "one")["0"], arrays["arg:a"])
    assert np.array_equal(ndarray_file.read(tmp_path / "np")["x"], np.ones((2, 2)))
    for name, content in (("named", named), ("listed", list(listed.values())), ("one", [named["arg:a"]])):
        ndarray_file.write(tmp_path / "again", content)
        assert (tmp_path / "again").read_bytes() == (tmp_path / name).read_bytes()
    # And this test's own writer writes the same.
    assert (tmp_path / "named").read_bytes() == as_file(*arrays.values(), names=list(arrays))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04" + bytes(60), "begins with 0x.*expected 0x112"),
        (as_file(np.ones((2, 2), np.float32), numbers=(1 << 62, 1 << 62)), "needs .* bytes; 24 are left"),
        (as_file(np.ones((2, 2), np.float32)) + b"x", "1 bytes are left over"),
        (as_file(np.ones(2, np.float32), np.ones(2, np.float32), names=("a", "a")), "two arrays have one name"),
        (as_file(np.ones(2, np.float32), names=("a", "b")), "2 names for 1 arrays"),
    ],
)
def test_what_is_no_list_of_arrays_is_refused_with_the_place(tmp_path, content, message):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ValueError, match=rf"x, byte \d+: .*{message}"):
        ndarray_file.read(tmp_path / "x")


@pytest.mark.parametrize("size", [1, 3, 8])
def test_mxnet_centres_and_momentum(tmp_path, monkeypatch, size):
    """Padding rows are cut; also where whole ranks are padding (8 ranks of 2 rows for 11 classes)."""
    monkeypatch.setattr("partial_fc.checkpoint.rows.PART_BYTES", 3 * (8 * D + 4))
    centre_CD, mom_CD = mx_files(tmp_path / "mx", size)
    import_centres(ImportOptions((tmp_path / "mx",), tmp_path / "out", num_classes=C, momentum_lr=0.01))
    for ranks in (1, 3):
        rows = loaded(tmp_path / "out", ranks)
        assert torch.equal(rows["centres"], centre_CD)
        assert torch.equal(rows["momentum"], mom_CD / -0.01)
        assert not rows["touched"].any()


@pytest.mark.mxnet
def test_momentum_of_mxnet_means_the_same_step_here(mx, tmp_path):
    """Two steps there; one step there, imported, and one here."""
    lr, grads = 0.05, [values(3), values(4)]
    weight, mom = mx.nd.array(values(1).numpy()), mx.nd.array(values(2).numpy() * 0.01)

    def there(grad):
        mx.nd.sgd_mom_update(weight, mx.nd.array(grad.numpy()), mom, out=weight, lr=lr, wd=5e-4, momentum=0.9)

    there(grads[0])
    mx.nd.save(str(tmp_path / "0_centers.param"), weight)
    mx.nd.save(str(tmp_path / "0_centers_mom.param"), mom)
    there(grads[1])
    import_centres(ImportOptions((tmp_path,), tmp_path / "out", momentum_lr=lr))
    rows = loaded(tmp_path / "out", 1)
    RowSGD().step(rows["centres"], {"momentum": rows["momentum"]}, grads[1].clone(), lr)
    np.testing.assert_allclose(rows["centres"], weight.asnumpy(), rtol=1e-5, atol=1e-6)


def test_mxnet_files_need_the_number_of_classes_and_the_rate(tmp_path):
    mx_files(tmp_path / "mx", 4)
    with pytest.raises(ValueError, match=r"4 file\(s\) with 3, 3, 3, 3 rows.*9 to 12 classes: give --num-classes"):
        import_centres(ImportOptions((tmp_path / "mx",), tmp_path / "out", momentum_lr=1.0))
    with pytest.raises(ValueError, match="expected 4 each for --num-classes 13"):
        import_centres(ImportOptions((tmp_path / "mx",), tmp_path / "out", num_classes=13, momentum_lr=1.0))
    with pytest.raises(ValueError, match=r"give --momentum-lr.*or give the R_centers.param files alone"):
        import_centres(ImportOptions((tmp_path / "mx",), tmp_path / "out", num_classes=C))
    files = tuple(tmp_path / f"mx/{rank}_centers.param" for rank in range(4))
    import_centres(ImportOptions(files, tmp_path / "out", num_classes=C))
    assert not loaded(tmp_path / "out", 1)["momentum"].any()
    with pytest.raises(ValueError, match="none of rank 1"):
        import_centres(ImportOptions((files[0], files[2]), tmp_path / "b", num_classes=6))


# ---- arcface_torch


def shards(size: int) -> list[slice]:
    of = [Shard.of(C, rank, size) for rank in range(size)]
    return [slice(shard.start, shard.stop) for shard in of]


def first_version(folder: Path, size: int):
    """rank_R_softmax_weight.pt and its momentum."""
    for rank, part in enumerate(shards(size)):
        torch.save(values(1)[part].clone(), folder / f"rank_{rank}_softmax_weight.pt")
        torch.save(values(2)[part].clone(), folder / f"rank_{rank}_softmax_weight_mom.pt")


def second_version(folder: Path, size: int):
    """softmax_fc_gpu_R.pt: the state dict that its PartialFC gives."""
    for rank, part in enumerate(shards(size)):
        torch.save({"weight": values(1)[part].clone()}, folder / f"softmax_fc_gpu_{rank}.pt")


def third_version(folder: Path, size: int, optimizer_type=torch.optim.SGD, steps: int = 2):
    """checkpoint_gpu_R.pt: one optimizer over backbone and centres. Returns rank 0's backbone."""
    torch.manual_seed(0)
    first = models.build("tiny", D, 16)
    for rank, part in enumerate(shards(size)):
        backbone = copy.deepcopy(first)
        weight = nn.Parameter(values(1)[part].clone())
        groups = [{"params": backbone.parameters()}, {"params": [weight]}]
        options = {"momentum": 0.9} if optimizer_type is torch.optim.SGD else {}
        optimizer = optimizer_type(groups, lr=0.1, **options)
        for step in range(steps):
            for number, p in enumerate([*backbone.parameters(), weight]):
                if p.requires_grad:
                    p.grad = torch.full_like(p, 1e-3 * (number + step))
            weight.grad = values(5 + step)[part]
            optimizer.step()
        torch.save(
            {
                "epoch": 3,
                "global_step": 1200,
                "state_dict_backbone": backbone.state_dict(),
                "state_dict_softmax_fc": {"weight": weight.detach()},
                "state_optimizer": optimizer.state_dict(),
                "state_lr_scheduler": {"base_lr": 0.1, "_step_count": 5},
            },
            folder / f"checkpoint_gpu_{rank}.pt",
        )
    return backbone


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("write", [first_version, second_version])
def test_arcface_torch_centres(tmp_path, capsys, size, write):
    (tmp_path / "in").mkdir()
    write(tmp_path / "in", size)
    import_centres(ImportOptions((tmp_path / "in",), tmp_path / "out"))
    printed = capsys.readouterr().out
    assert f"start with --start-centres {tmp_path / 'out'}" in printed
    assert ("it starts at zero" in printed) == (write is second_version)
    for ranks in (1, 3):
        rows = loaded(tmp_path / "out", ranks)
        assert torch.equal(rows["centres"], values(1))
        expected = values(2) if write is first_version else torch.zeros(C, D)
        assert torch.equal(rows["momentum"], expected)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_whole_checkpoint_of_arcface_torch_goes_on_as_it_would_there(tmp_path, size, kind):
    """One more step, made there and here: the same centres and the same backbone."""
    folder = tmp_path / "in"
    folder.mkdir()
    there = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[kind]
    third_version(folder, size, there)
    options = ImportOptions((folder,), tmp_path / "out", network="tiny", image_size=16, step=1200, position=9600)
    import_centres(options)
    found = checkpoint.Checkpoint(tmp_path / "out")
    assert (found.step, found.manifest["position"]) == (1200, 9600)
    row_optimizer = RowAdamW() if kind == "adamw" else None
    rows = loaded(tmp_path / "out", 2, optimizer=row_optimizer)
    assert rows["touched"].eq(1200).all()

    (tmp_path / "later").mkdir()
    backbone = third_version(tmp_path / "later", 1, there, steps=3)
    expected = torch.load(tmp_path / "later/checkpoint_gpu_0.pt", weights_only=True)["state_dict_softmax_fc"]["weight"]
    centre_CD, touched = rows.pop("centres"), rows.pop("touched")
    assert len(touched) == C
    if kind == "sgd":
        RowSGD(weight_decay=0.0).step(centre_CD, rows, values(7).clone(), 0.1)
    else:
        RowAdamW().step(centre_CD, rows, values(7).clone(), 0.1)
    torch.testing.assert_close(centre_CD, expected, rtol=1e-5, atol=1e-6)

    again = models.build("tiny", D, 16)
    again.load_state_dict(found.backbone())
    optimizer = build(kind, again, 0.9, 0.01 if kind == "adamw" else 0.0)
    load_named_state(optimizer, again, found.optimizer())
    set_lr(optimizer, 0.1)
    for number, p in enumerate(again.parameters()):
        if p.requires_grad:
            p.grad = torch.full_like(p, 1e-3 * (number + 2))
    optimizer.step()
    for name, p in again.named_parameters():
        torch.testing.assert_close(p, dict(backbone.named_parameters())[name], rtol=1e-5, atol=1e-6)


def test_a_backbone_must_be_in_the_files(tmp_path):
    second_version(tmp_path, 2)
    with pytest.raises(ValueError, match=r"holds no backbone; import without it"):
        import_centres(ImportOptions((tmp_path,), tmp_path / "out", network="tiny", image_size=16))


def test_files_of_other_runs_or_kinds_are_refused(tmp_path):
    first_version(tmp_path, 3)
    other = tmp_path / "other"
    other.mkdir()
    first_version(other, 2)
    files = tmp_path / "rank_0_softmax_weight.pt", other / "rank_1_softmax_weight.pt"
    for paths, message in (
        ((tmp_path, other), "are both of rank 0: give one set"),
        (files, r"2 file\(s\) with 4, 5 rows; expected 5 in .*rank_0_softmax_weight.pt: are all files of one run"),
        ((tmp_path / "rank_1_softmax_weight.pt",), "none of rank 0"),
        ((*files, tmp_path / "rank_0_softmax_weight_mom.pt"), "the momentum of rank 1 is missing"),
        ((other / "nothing.pt",), "nothing.pt not found"),
        ((Path(__file__),), "none of a known kind"),
    ):
        with pytest.raises(ValueError, match=message):
            import_centres(ImportOptions(paths, tmp_path / "out"))
    second_version(tmp_path, 3)
    with pytest.raises(ValueError, match=r"softmax_fc_gpu_R.pt and .*rank_R_softmax_weight.pt; expected"):
        import_centres(ImportOptions((tmp_path,), tmp_path / "out"))
    with pytest.raises(ValueError, match="which are 11 classes; --num-classes says 12"):
        import_centres(ImportOptions((other,), tmp_path / "out", num_classes=12))


@pytest.mark.parametrize(
    ("flags", "message"), [({"step": 5}, "give --network"), ({"momentum_lr": 0.1}, "goes with R_centers_mom.param")]
)
def test_flags_that_do_not_go_together(tmp_path, flags, message):
    second_version(tmp_path, 1)
    with pytest.raises(ValueError, match=message):
        import_centres(ImportOptions((tmp_path,), tmp_path / "out", **flags))
    assert not (tmp_path / "out").exists()
