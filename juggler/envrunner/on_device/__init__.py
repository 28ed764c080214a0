"""Sampling from environments that are tensors on a device."""
