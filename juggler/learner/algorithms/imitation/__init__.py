"""Imitation of demonstrations by a discriminator, around any algorithm."""
