"""The fate of batches: events in, commands out, and the books."""
