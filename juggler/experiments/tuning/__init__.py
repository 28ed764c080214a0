"""`juggler tune`: what a machine can do, and which sizes suit it."""
