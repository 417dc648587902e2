"""A black-box suite for endpoint pickers, behind a real Envoy. `world` says how to point it at any picker."""
