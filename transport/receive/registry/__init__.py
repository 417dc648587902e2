"""What a listener expects, and which connections it knows. Shared by its threads."""
