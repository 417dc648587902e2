"""Disk below memory."""
