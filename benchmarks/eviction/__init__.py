"""Policies that no node may choose, to compare its own with, and pools to replay traces through."""
