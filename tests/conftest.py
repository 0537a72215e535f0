"""Settings that all tests share."""

from hypothesis import settings

# No deadlines: how long an example takes says more of the machine than of the code. The same examples on
# every run, so that a change is never blamed for a failure that it did not cause.
settings.register_profile("bitsmith", deadline=None, derandomize=True)
settings.load_profile("bitsmith")
