"""What each rank runs in the tests of sharded models."""
