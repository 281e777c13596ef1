"""--start-centres: the centres of a checkpoint, and nothing else of it."""

import pytest
import torch

from partial_fc import checkpoint
from partial_fc.checkpoint.consistency import open_centres
from partial_fc.checkpoint.rows_now import load_centres
from partial_fc.comm import SingleWorld
from partial_fc.head import PartialFC
from partial_fc.head.rows import RowAdamW
from tests.flat import flat_head
from tests.unit.stored_checkpoints import D, OneOf, heads_of, save, whole


def fresh(size: int, **options) -> list[PartialFC]:
    margin = heads_of(1)[0].margin
    return [flat_head(11, D, margin, world=OneOf(rank, size), **options) for rank in range(size)]


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 3), (3, 13)])
@pytest.mark.parametrize("made", [None, (0, 4, 5, 10)])
def test_centres_alone_whatever_the_optimizer_and_the_number_of_ranks(tmp_path, before, after, made):
    heads = heads_of(before, made=made, sub_centres=2)
    save(tmp_path / "step-00000007", heads)
    started = fresh(after, optimizer=RowAdamW(), sub_centres=2)
    for head in started:
        load_centres(open_centres(tmp_path, SingleWorld()), head)
        assert head.num_steps == 0
    rows = whole(started)
    assert torch.equal(rows.pop("centres"), whole(heads)["centres"])
    assert not any(t.any() for t in rows.values())
    assert torch.equal(*(torch.cat([h.rows.created(h.rows.start, h.rows.stop) for h in hs]) for hs in (heads, started)))
    assert len(torch.cat([h.centres for h in started])) == 11  # the others can be made


def test_another_head_and_missing_files_are_refused(tmp_path):
    (folder,) = save(tmp_path / "a", heads_of(3))
    with pytest.raises(ValueError, match="sub_centres 1; this run has 2"):
        load_centres(open_centres(folder, SingleWorld()), fresh(1, sub_centres=2)[0])
    sorted(folder.glob("head-00001-*"))[0].unlink()
    with pytest.raises(ValueError, match="no file holds classes 4 to 7"):
        open_centres(folder, SingleWorld())
    load_centres(checkpoint.Checkpoint(folder), fresh(3)[2])  # whoever does not need it does not miss it
    path = sorted(folder.glob("head-00002-*"))[0]
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="is damaged"):
        load_centres(checkpoint.Checkpoint(folder), fresh(3)[2])


def test_centres_alone_cannot_be_resumed(tmp_path):
    from partial_fc.verbs.checkpoint.import_centres import ImportOptions, import_centres

    torch.save(torch.ones(11, D), tmp_path / "rank_0_softmax_weight.pt")
    import_centres(ImportOptions((tmp_path,), tmp_path / "out"))
    with pytest.raises(ValueError, match="without a backbone: start with --start-centres"):
        checkpoint.Checkpoint(tmp_path / "out").check_has_backbone()
    load_centres(open_centres(tmp_path / "out", SingleWorld()), head := fresh(1)[0])
    assert bool((head.centres == 1).all())
    (whole_one,) = save(tmp_path / "a", heads_of(1))
    checkpoint.Checkpoint(whole_one).check_has_backbone()
