"""`tq-bench scale`: what a claim costs as a partition grows, and as many wait for one put."""
