"""Who is let in where ranks meet and report: the handshake proves that both sides know the run's secret, the
limiter bounds what anybody may cost before that (SECURITY.md)."""
