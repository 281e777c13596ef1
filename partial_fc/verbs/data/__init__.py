"""Commands that write data sets: `partial-fc data pack`, `index` and `pairs`."""
