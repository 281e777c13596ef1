"""Recipe `face` does not train on data that is none, and says so before it has allocated anything."""

from partial_fc.data.recordio import RecordReader, RecordWriter, unpack
from tests.recipes.conftest import face
from tests.recipes.launch import several


def test_labels_of_another_number_of_classes_are_refused(glyphs, tmp_path):
    """The head would leave such images out of every class: a loss that never falls, and no word about it."""
    with RecordReader(glyphs / "train.rec") as reader, RecordWriter(tmp_path / "train.rec") as writer:
        for key in range(1, 201):
            record = reader.read(key)
            assert unpack(record)[1]
            writer.write(key, record)
    flags = f"--dataset glyphs --rec {tmp_path} --num-classes 14 --val-targets --max-steps 5 --batch-size 8"
    said = several([face(tmp_path / "run", flags)])
    assert said.count("ended with: ValueError: the training data is not fit to train on (--check-data quick") == 2
    assert "error   label-range (4): labels outside 0 to 13" in said
    assert f"{tmp_path}/train.rec, key 197, class 14" in said
    assert not list((tmp_path / "run").rglob("*.safetensors"))
