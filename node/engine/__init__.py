"""The node's engine: started, watched, listened to, and ended."""
