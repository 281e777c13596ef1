"""All readers of files that come from elsewhere, by name."""

from tests.faults import checkpoint_readers, data_readers, foreign_readers

READERS = {
    reader.name: reader for module in (data_readers, foreign_readers, checkpoint_readers) for reader in module.READERS
}
