"""Sampling from environments that are tensors on a device, such as a physics engine on a GPU."""
