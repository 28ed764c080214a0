"""Trained policies for use elsewhere, without driver, environment or gRPC."""
