"""``fleetjob ui``: one page for the jobs of this machine and of a cluster.

The data is read when the page asks for it; nothing runs while nobody looks.
"""
