"""Settings of all tests."""

from hypothesis import settings

# The same examples every time, so that a failure is the change's and not the day's; no deadline,
# because the first example often imports or compiles something.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
