"""The interface of algorithms, and its gradient-based implementation."""
