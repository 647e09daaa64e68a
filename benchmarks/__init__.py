"""`tq-bench`: what the service costs, beside the copy that nobody can avoid."""
