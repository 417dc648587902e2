"""What each tenant may take, and has taken."""
