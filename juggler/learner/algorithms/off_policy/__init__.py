"""What algorithms share that learn from steps that they keep."""
