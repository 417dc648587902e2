"""Routes, middleware and handlers."""
