"""Many servers behind one address, on Ray Serve. May import the server and below, and ray."""
