"""HTTP to engines: kept connections and the two legs of a request."""
