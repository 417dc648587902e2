"""Generated gRPC code; `make proto` makes it from node.proto, a test checks that it is current."""
