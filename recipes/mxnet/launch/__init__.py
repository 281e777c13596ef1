"""`partial-fc launch`: starts a job's scheduler, servers and workers on the hosts of a file, as MXNet's launch.py."""
