"""Training as a service: people upload labelled texts over HTTP and get a classifier (`tether serve`)."""
