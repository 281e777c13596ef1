"""Sets beyond a single .rec or folder: several sets as one source, tar shards here or on a server, Parquet files."""
