"""All readers of files that come from elsewhere, by name."""

from tests.faults import checkpoint_readers, data_readers, database_readers, foreign_readers, list_readers

_MODULES = (data_readers, foreign_readers, checkpoint_readers, list_readers, database_readers)

READERS = {reader.name: reader for module in _MODULES for reader in module.READERS}
