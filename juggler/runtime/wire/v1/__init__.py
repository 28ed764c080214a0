"""Generated from proto/juggler/runtime/wire/v1 by `make proto`."""
