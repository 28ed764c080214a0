"""Groups of learners that update together."""
