"""The hybrid prefix cache on recorded traces."""
