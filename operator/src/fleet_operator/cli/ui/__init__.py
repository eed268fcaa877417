"""``fleetjob ui``: one page for the jobs of this machine and of a cluster.

The data is read when the page requests it; nothing runs while the page is not displayed.
"""
