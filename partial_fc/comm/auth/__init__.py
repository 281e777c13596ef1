"""Authentication of ranks: the handshake proves that both sides know the run's secret; the limiter bounds what
connections cost before that (SECURITY.md)."""
