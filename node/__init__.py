"""What every node is: a page arena, a hybrid cache, an engine link and a KVCache sender."""
