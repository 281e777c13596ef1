"""The flags --gradient-compression, --compression-threshold and --compression-rank, which several recipes have."""

from typing import Protocol

from partial_fc.optim.compression import CompressionKind, Compressor, build_compressor


class CompressionFlags(Protocol):
    @property
    def gradient_compression(self) -> CompressionKind: ...
    @property
    def compression_threshold(self) -> float | None: ...
    @property
    def compression_rank(self) -> int | None: ...
    @property
    def seed(self) -> int: ...


def check(config: CompressionFlags) -> None:
    """Raises ValueError for flags that do nothing with this kind of compression, or make no sense."""
    for flag, value, kind in (
        ("--compression-threshold", config.compression_threshold, "2bit"),
        ("--compression-rank", config.compression_rank, "powersgd"),
    ):
        if value is not None and config.gradient_compression != kind:
            raise ValueError(
                f"{flag} goes with --gradient-compression {kind}; this run's is {config.gradient_compression}"
            )
        if value is not None and not value > 0:
            raise ValueError(f"{flag} is {value}; expected more than 0")


def build(config: CompressionFlags) -> Compressor:
    """What the flags say."""
    return build_compressor(
        config.gradient_compression,
        threshold=config.compression_threshold or 0.5,
        rank=config.compression_rank or 4,
        seed=config.seed,
    )
