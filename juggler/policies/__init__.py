"""A trained policy as a thing to use elsewhere: no driver, no environment and no gRPC."""
