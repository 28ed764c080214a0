"""A trained policy for use elsewhere, without driver, environment or gRPC."""
