"""Imitation of demonstrations by a discriminator, with any algorithm."""
