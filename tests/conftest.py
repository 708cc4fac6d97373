"""Settings of the whole suite."""

from hypothesis import settings

# Compilation happens inside the first example, so deadlines would measure the compiler; derandomised, so that a red
# run can be repeated.
settings.register_profile("silobayes", deadline=None, derandomize=True)
settings.load_profile("silobayes")
