"""What an algorithm is, and the gradient-based one that most are."""
