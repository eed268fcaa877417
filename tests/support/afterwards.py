"""Examples of library output that a failing process prints after its traceback."""

DESTROY = (
    "[rank0]:[W1124 03:45:17.412 ProcessGroupNCCL.cpp:1479] Warning: WARNING: destroy_process_group() was not"
    " called before program exit, which can leak resources. (function operator())\n"
)
TRACKER = (
    "/opt/fleet/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There"
    " appear to be 1 leaked semaphore objects to clean up at shutdown\n"
    "  warnings.warn('resource_tracker: There appear to be %d '\n"
)
TERMINATE = "terminate called without an active exception\n"
