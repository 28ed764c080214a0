"""What algorithms with a policy and a value function share."""
