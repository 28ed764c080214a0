"""What becomes of batches: events in, commands out, the books. No input or output in here."""
