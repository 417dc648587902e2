"""Experimental: one embedded model over several processes, a stage of layers each."""
