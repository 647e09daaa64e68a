"""`tq`: what a person asks of a running service, on the command line."""
