"""What tests of several rooms share: worlds to test in, scripted parts, and programs."""
