"""An endpoint picker for Envoy and for gateways built on it: says over external processing which server gets a request."""
