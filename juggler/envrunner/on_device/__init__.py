"""Sampling from environments that compute in tensors on a device."""
